"""Special functions of two tensors: polynomials by degree, zeta, incomplete gamma, divisors.

Source of the operators: ATen ``Math.h``; polynomials are computed in float32 of 16-bit floats.
"""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Scalar, apply, cast, const
from .builder import Builder
from .pointwise import elementwise
from .promotion import Operand, float_dtype, result_dtype
from .registry import NotLowered, lowers
from .value import Value

aten = torch.ops.aten


def _register(operator: str, name: str, *overloads: str) -> None:
    packet = getattr(aten, operator)

    @lowers(*(getattr(packet, overload) for overload in overloads))
    def lower(builder: Builder, self: Operand, other: Operand) -> Value:
        """A scalar op of two operands, in the float dtype of their promoted dtype."""
        dtype = float_dtype(result_dtype((self, other)))
        return elementwise(builder, lambda a, b: apply(name, a, b), self, other, dtype=dtype)


def _register_polynomial(family: str, name: str) -> None:
    packet = getattr(aten, f"special_{family}")

    @lowers(packet.default, packet.x_scalar, packet.n_scalar)
    def lower(builder: Builder, x: Operand, n: Operand) -> Value:
        """The polynomial of degree n at x, in the float dtype of their promoted dtype."""
        dtype = float_dtype(result_dtype((x, n)))
        return elementwise(builder, lambda a, b: apply(name, a, b), x, n, dtype=dtype)


for _kind in "tuvw":
    _register_polynomial(f"chebyshev_polynomial_{_kind}", f"chebyshev_{_kind}")
    _register_polynomial(f"shifted_chebyshev_polynomial_{_kind}", f"shifted_chebyshev_{_kind}")
_register_polynomial("hermite_polynomial_h", "hermite_h")
_register_polynomial("hermite_polynomial_he", "hermite_he")
_register_polynomial("laguerre_polynomial_l", "laguerre")
_register_polynomial("legendre_polynomial_p", "legendre")
_register("special_zeta", "zeta", "default", "self_scalar", "other_scalar")


def _register_gamma(name: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value, other: Value) -> Value:
        """An incomplete gamma function of parameter ``self`` at ``other``.

        Raises NotLowered: for float64, as its kernel has the digits of float32.
        """
        dtype = result_dtype((self, other))
        if dtype is dtypes.float64:
            raise NotLowered(f"{name} of float64: its kernel has the digits of float32")
        return elementwise(builder, lambda a, x: apply(name, a, x), self, other, dtype=dtype)


_register_gamma("igamma")
_register_gamma("igammac")


@lowers(aten.gcd.default)
def lower_gcd(builder: Builder, self: Value, other: Value) -> Value:
    """The greatest common divisor of |self| and |other|, in the promoted integer dtype."""
    return elementwise(builder, lambda a, b: apply("gcd", a, b), self, other)


@lowers(aten.lcm.default)
def lower_lcm(builder: Builder, self: Value, other: Value) -> Value:
    """``|self / gcd · other|``, 0 where either is 0.

    Narrow integers are multiplied in 32 bits, as C++ promotes them.
    """
    common = result_dtype((self, other))
    wide = common if common.bits >= 32 else dtypes.int32

    def body(a: Scalar, b: Scalar) -> Scalar:
        a, b = cast(a, wide), cast(b, wide)
        divisor = apply("gcd", a, b)
        divisor = apply("maximum", divisor, const(1, wide))
        return apply("abs", apply("mul", apply("trunc_divide", a, divisor), b))

    return elementwise(builder, body, self, other)
