"""Comparisons, logic and selection. Source: ATen schemas of the same names."""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Scalar, apply, cast, const, where
from .builder import Builder, operand
from .pointwise import elementwise, lowers_elementwise, rounded_operand
from .promotion import Operand, compute_dtype, result_dtype
from .registry import lowers
from .value import Value

aten = torch.ops.aten


def _register_comparison(name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.Tensor, packet.Scalar)
    def lower(builder: Builder, self: Value, other: Operand) -> Value:
        """A number is first rounded to the common dtype: comparisons do not widen."""
        common = result_dtype((self, other))
        rounded = rounded_operand(other, common)
        return elementwise(builder, lambda a, b: apply(name, a, b), self, rounded, dtype=common)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register_comparison(_name)


def _register_logical(name: str, scalar_op: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value, other: Value) -> Value:
        """A logical operator of two tensors of any dtypes, where nonzero (also NaN) is true."""
        return elementwise(
            builder, lambda a, b: apply(scalar_op, a, b), self, other, dtype=dtypes.bool_
        )


_register_logical("logical_and", "bitwise_and")
_register_logical("logical_or", "bitwise_or")
_register_logical("logical_xor", "bitwise_xor")


@lowers(aten.logical_not.default)
def lower_logical_not(builder: Builder, self: Value) -> Value:
    """Whether an element is 0, as bool."""
    return elementwise(builder, lambda x: ~x, self, dtype=dtypes.bool_)


def _register_float_test(name: str) -> None:
    @lowers_elementwise(getattr(aten, name).default)
    def body(x: Scalar) -> Scalar:
        """A test of each element, as bool; False everywhere for integers and bools."""
        return apply(name, x) if x.dtype.is_float else const(False, dtypes.bool_)


_register_float_test("isnan")
_register_float_test("isinf")


@lowers_elementwise(aten.isfinite.default)
def isfinite(x: Scalar) -> Scalar:
    """Whether an element is neither infinite nor NaN, as bool; True of integers and bools."""
    if not x.dtype.is_float:
        return const(True, dtypes.bool_)
    return ~(apply("isnan", x) | apply("isinf", x))


@lowers_elementwise(aten.signbit.default)
def signbit(x: Scalar) -> Scalar:
    """Whether the sign bit is set, as bool: True of −0; False of bools."""
    if x.dtype is dtypes.bool_:
        return const(False, dtypes.bool_)
    return (apply("copysign", 1, x) if x.dtype.is_float else x) < 0


@lowers(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def lower_where(builder: Builder, condition: Value, self: Operand, other: Operand) -> Value:
    """``self`` where the condition is nonzero, else ``other``, broadcast to the result's sizes.

    Numbers are rounded to the result's dtype.
    """
    out = builder.out
    test = operand(condition, out.sizes, dtypes.bool_)
    yes, no = (
        operand(rounded_operand(branch, out.dtype), out.sizes, out.dtype)
        for branch in (self, other)
    )
    return builder.pointwise(where(test, yes, no), out.sizes)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def lower_masked_fill(builder: Builder, self: Value, mask: Value, value: Operand) -> Value:
    """``value`` where the mask is nonzero, else ``self``, in the dtype of ``self``."""
    return lower_where(builder, mask, value, self)


@lowers(aten.nan_to_num.default)
def lower_nan_to_num(
    builder: Builder,
    self: Value,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> Value:
    """NaN and infinities replaced; integers are returned as they are.

    NaN becomes ``nan`` (0 if None), infinities ``posinf`` and ``neginf`` (if None, the largest and
    the lowest finite number of the dtype).
    """
    if not self.dtype.is_float:
        return self
    limits = torch.finfo(getattr(torch, self.dtype.name))
    compute = compute_dtype(self.dtype)
    above = const(limits.max if posinf is None else posinf, compute)
    below = const(limits.min if neginf is None else neginf, compute)

    def body(x: Scalar) -> Scalar:
        finite = where(apply("isinf", x), where(x > 0.0, above, below), x)
        return where(apply("isnan", x), nan or 0.0, finite)

    return elementwise(builder, body, self)


@lowers_elementwise(aten.heaviside.default)
def heaviside(x: Scalar, at_zero: Scalar) -> Scalar:
    """0 below 0, 1 above, and ``at_zero`` at 0; NaN gives 0."""
    return where(apply("eq", x, 0), at_zero, cast(x > 0, x.dtype))
