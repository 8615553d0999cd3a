"""Arithmetic, elementwise. Source: ATen schemas and TensorIterator's type promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.scalar import Scalar, apply, cast, const, where
from ..symbolic.sizes import Expr
from .builder import Builder, operand
from .promotion import Operand, compute_dtype, float_dtype, result_dtype, rounded_to
from .registry import lowers
from .symbols import literal
from .value import Value

aten = torch.ops.aten
Body = Callable[..., Scalar]


def elementwise(
    builder: Builder, body: Body, *operands: Operand, dtype: DType | None = None
) -> Value:
    """One `Pointwise` node: ``body`` of the operands, broadcast to the result's sizes.

    The operands are converted to the compute dtype of ``dtype``, or of their promoted dtype:
    float16 and bfloat16 are computed in float32. The body's value is converted to the result's
    dtype.
    """
    out = builder.out
    compute = compute_dtype(dtype or result_dtype(operands))
    scalars = [operand(arg, out.sizes, compute) for arg in operands]
    return builder.pointwise(cast(body(*scalars), out.dtype), out.sizes)


def lowers_elementwise(
    *overloads: torch._ops.OpOverload, to_float: bool = False
) -> Callable[[Body], Body]:
    """Registers a function of single elements as the lowering of elementwise operators.

    Its first parameters, annotated as `Scalar`, are the operator's tensors (or numbers) as
    `elementwise` gives them; the others are the arguments that follow. Gives the function itself.

    Args:
        to_float: whether integers and bools are computed in the default float dtype.
    """

    def register(body: Body) -> Body:
        count = list(body.__annotations__.values()).count("Scalar") - 1  # without the result's

        def lower(builder: Builder, *arguments: Any, **options: Any) -> Value:
            operands, rest = arguments[:count], arguments[count:]
            dtype = float_dtype(result_dtype(operands)) if to_float else None
            return elementwise(
                builder, lambda *x: body(*x, *rest, **options), *operands, dtype=dtype
            )

        lower.__doc__ = body.__doc__
        lowers(*overloads)(lower)
        return body

    return register


def unwidened(builder: Builder, body: Body, *operands: Operand) -> Value:
    """`elementwise` for operators to which PyTorch gives operands in the promoted dtype.

    A number or a tensor without dimensions that float16 or bfloat16 does not have is another one
    there: 1e-9 is 0, and 1e6 infinite.
    """
    common = result_dtype(operands)

    def of_rounded(*scalars: Scalar) -> Scalar:
        pairs = zip(scalars, operands, strict=True)
        return body(*(_as_given(scalar, operand, common) for scalar, operand in pairs))

    rounded = [rounded_operand(arg, common) for arg in operands]
    return elementwise(builder, of_rounded, *rounded, dtype=common)


def _as_given(scalar: Scalar, operand: Operand, common: DType) -> Scalar:
    of_other = isinstance(operand, Value) and operand.dtype is not common
    return rounded_to(scalar, common) if of_other or isinstance(operand, Expr) else scalar


_FLOAT_UNARY = (
    "reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "
    "sinh cosh tanh asinh acosh atanh erf erfc sigmoid"
)
_SAME_UNARY = "neg abs floor ceil trunc round sign"


def _register_unary(name: str, to_float: bool) -> None:
    overload = getattr(aten, name).default

    @lowers(overload)
    def lower(builder: Builder, self: Value) -> Value:
        """One scalar op per element.

        A ``to_float`` operator computes integers and bools in the default float; rounding of
        integers, and abs and sign of bools, return ``self``.
        """
        if to_float:
            return elementwise(
                builder, lambda x: apply(name, x), self, dtype=float_dtype(self.dtype)
            )
        unchanged = not self.dtype.is_float and name in ("floor", "ceil", "trunc", "round")
        positive = name in ("abs", "sign") and self.dtype.kind is Kind.BOOL
        if unchanged or positive:
            return self
        return elementwise(builder, lambda x: apply(name, x), self)


for _name in _FLOAT_UNARY.split():
    _register_unary(_name, to_float=True)
for _name in _SAME_UNARY.split():
    _register_unary(_name, to_float=False)


@lowers(aten.square.default)
def lower_square(builder: Builder, self: Value) -> Value:
    """``x · x``; integers wrap."""
    return elementwise(builder, lambda x: apply("square", x), self)


@lowers(aten.round.decimals)
def lower_round_decimals(builder: Builder, self: Value, *, decimals: int) -> Value:
    """x rounded to a number of decimal places, ties to even; integers are returned as they are.

    Computed as round(x · 10^decimals) / 10^decimals, in float32 for 16-bit floats.
    """
    if not self.dtype.is_float:
        return self
    scale = const(10.0 ** abs(decimals), compute_dtype(self.dtype))
    before, after = ("mul", "div") if decimals >= 0 else ("div", "mul")
    return elementwise(
        builder, lambda x: apply(after, apply("round", apply(before, x, scale)), scale), self
    )


def scaled(value: Scalar, alpha: Operand) -> Scalar:
    """alpha · value, in the value's dtype."""
    if not isinstance(alpha, Value) and alpha == 1:
        return value
    factor = operand(alpha, (), value.dtype)
    return apply("bitwise_and" if value.dtype.kind is Kind.BOOL else "mul", value, factor)


@lowers(aten.add.Tensor, aten.add.Scalar)
def lower_add(builder: Builder, self: Operand, other: Operand, alpha: Operand = 1) -> Value:
    """``self + alpha · other`` in the promoted dtype; of bools, ``self | (alpha & other)``."""
    return elementwise(builder, lambda a, b: plus(a, scaled(b, alpha)), self, other)


def plus(a: Scalar, b: Scalar) -> Scalar:
    """a + b, logical or of bools."""
    return apply("bitwise_or" if a.dtype.kind is Kind.BOOL else "add", a, b)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def lower_sub(builder: Builder, self: Operand, other: Operand, alpha: Operand = 1) -> Value:
    """``self − alpha · other`` in the promoted dtype; integers wrap."""
    return elementwise(builder, lambda a, b: a - scaled(b, alpha), self, other)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def lower_rsub(builder: Builder, self: Operand, other: Operand, alpha: Operand = 1) -> Value:
    """``other − alpha · self`` in the promoted dtype; integers wrap."""
    return elementwise(builder, lambda a, b: b - scaled(a, alpha), self, other)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def lower_mul(builder: Builder, self: Operand, other: Operand) -> Value:
    """``self · other`` in the promoted dtype; integers wrap, bools are and-ed."""
    return elementwise(builder, times, self, other)


def times(a: Scalar, b: Scalar) -> Scalar:
    """a · b, logical and of bools."""
    return apply("bitwise_and" if a.dtype.kind is Kind.BOOL else "mul", a, b)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def lower_div(builder: Builder, self: Operand, other: Operand) -> Value:
    """``self / other``; integers and bools are divided in the default float dtype."""
    dtype = float_dtype(result_dtype((self, other)))
    return elementwise(builder, lambda a, b: a / b, self, other, dtype=dtype)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def lower_div_mode(
    builder: Builder, self: Operand, other: Operand, *, rounding_mode: str | None = None
) -> Value:
    """``self / other``, rounded towards 0 (``"trunc"``) or towards −∞ (``"floor"``).

    Rounded divisions of integers stay integers. Without a mode it is `lower_div`.
    """
    if rounding_mode is None:
        return lower_div(builder, self, other)
    common = result_dtype((self, other))
    if rounding_mode == "trunc" and compute_dtype(common) is not common:

        def truncated(a: Scalar, b: Scalar) -> Scalar:
            # PyTorch rounds before it truncates.
            return apply("trunc", rounded_to(a / b, common))

        return elementwise(builder, truncated, self, other)
    name = "floor_divide" if rounding_mode == "floor" else "trunc_divide"
    return elementwise(builder, lambda a, b: apply(name, a, b), self, other)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def lower_floor_divide(builder: Builder, self: Operand, other: Operand) -> Value:
    """``floor(self / other)`` in the promoted dtype, also of integers."""
    common = result_dtype((self, other))
    dividend = rounded_operand(self, common)  # PyTorch widens divisors only
    return elementwise(builder, lambda a, b: a // b, dividend, other, dtype=common)


def _register_unwidened(name: str, overloads: str) -> None:
    packet = getattr(aten, name)

    @lowers(*(getattr(packet, overload) for overload in overloads.split()))
    def lower(builder: Builder, self: Operand, other: Operand) -> Value:
        """One scalar op of two operands, each first rounded to the promoted dtype: `unwidened`."""
        return unwidened(builder, lambda a, b: apply(name, a, b), self, other)


def _register_binary(name: str, overloads: str, to_float: bool = False) -> None:
    packet = getattr(aten, name)

    @lowers(*(getattr(packet, overload) for overload in overloads.split()))
    def lower(builder: Builder, self: Operand, other: Operand) -> Value:
        """A scalar op of two operands in their promoted dtype; ``to_float``: in its float dtype."""
        dtype = result_dtype((self, other))
        dtype = float_dtype(dtype) if to_float else dtype
        return elementwise(builder, lambda a, b: apply(name, a, b), self, other, dtype=dtype)


_register_unwidened("remainder", "Tensor Scalar Scalar_Tensor")
_register_unwidened("fmod", "Tensor Scalar")
_register_binary("atan2", "default", to_float=True)
_register_binary("nextafter", "default")
_register_binary("bitwise_and", "Tensor Scalar Scalar_Tensor")
_register_binary("bitwise_or", "Tensor Scalar Scalar_Tensor")
_register_binary("bitwise_xor", "Tensor Scalar Scalar_Tensor")


@lowers(aten.copysign.Tensor, aten.copysign.Scalar)
def lower_copysign(builder: Builder, self: Operand, other: Operand) -> Value:
    """``|self|`` with the sign of ``other``, −0 included; integers become the default float."""
    dtype = float_dtype(result_dtype((self, other)))
    return elementwise(builder, lambda a, b: apply("copysign", a, b), self, other, dtype=dtype)


@lowers(aten.bitwise_not.default)
def lower_bitwise_not(builder: Builder, self: Value) -> Value:
    """All bits inverted; of bools, the logical not."""
    return elementwise(builder, lambda x: ~x, self)


@lowers(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Scalar,
    aten.__lshift__.Tensor,
)
def lower_shift_left(builder: Builder, self: Operand, other: Operand) -> Value:
    """``self << other`` for integers, in the promoted dtype."""
    return elementwise(builder, lambda a, b: a << b, self, other)


@lowers(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Scalar,
    aten.__rshift__.Tensor,
)
def lower_shift_right(builder: Builder, self: Operand, other: Operand) -> Value:
    """``self >> other`` for integers; copies of the sign are shifted into signed ones."""
    return elementwise(builder, lambda a, b: a >> b, self, other)


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """The minimum, NaN if either is NaN; logical and of bools."""
    return apply("bitwise_and" if a.dtype.kind is Kind.BOOL else "minimum", a, b)


def larger(a: Scalar, b: Scalar) -> Scalar:
    """The maximum, NaN if either is NaN; logical or of bools."""
    return apply("bitwise_or" if a.dtype.kind is Kind.BOOL else "maximum", a, b)


@lowers(aten.minimum.default)
def lower_minimum(builder: Builder, self: Value, other: Value) -> Value:
    """The smaller element, NaN if either is NaN; of bools, the logical and."""
    return elementwise(builder, smaller, self, other)


@lowers(aten.maximum.default)
def lower_maximum(builder: Builder, self: Value, other: Value) -> Value:
    """The larger element, NaN if either is NaN; of bools, the logical or."""
    return elementwise(builder, larger, self, other)


@lowers(aten.fmin.default)
def lower_fmin(builder: Builder, self: Value, other: Value) -> Value:
    """The smaller element; where one of the two is NaN, the other one."""
    return elementwise(builder, lambda a, b: _ignoring_nan(smaller, a, b), self, other)


@lowers(aten.fmax.default)
def lower_fmax(builder: Builder, self: Value, other: Value) -> Value:
    """The larger element; where one of the two is NaN, the other one."""
    return elementwise(builder, lambda a, b: _ignoring_nan(larger, a, b), self, other)


def _ignoring_nan(choose: Body, a: Scalar, b: Scalar) -> Scalar:
    if not a.dtype.is_float:
        return choose(a, b)
    chosen = where(apply("isnan", b), a, choose(a, b))
    return where(apply("isnan", a), b, chosen)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def lower_clamp(
    builder: Builder, self: Value, min: Operand | None = None, max: Operand | None = None
) -> Value:
    """``min(max(self, min), max)`` with numbers or broadcasting tensors; None is no bound.

    ``max`` wins where min > max. NaN of the element or of a bound gives NaN.
    """
    bounds = [bound for bound in (min, max) if bound is not None]

    def body(x: Scalar, *limits: Scalar) -> Scalar:
        rest = list(limits)
        if min is not None:
            x = larger(x, rest.pop(0))
        return smaller(x, rest.pop(0)) if max is not None else x

    return elementwise(builder, body, self, *bounds)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def lower_clamp_min(builder: Builder, self: Value, min: Operand) -> Value:
    """``max(self, min)`` with a number or a broadcasting tensor; NaN of either gives NaN."""
    return elementwise(builder, larger, self, min)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def lower_clamp_max(builder: Builder, self: Value, max: Operand) -> Value:
    """``min(self, max)`` with a number or a broadcasting tensor; NaN of either gives NaN."""
    return elementwise(builder, smaller, self, max)


def power(base: Scalar, exponent: int | float) -> Scalar:
    """``base`` to a constant, in the dtype of ``base``.

    Small whole exponents, ±½ and −1 are products, roots and reciprocals, others the scalar op
    "pow".
    """
    is_float = base.dtype.is_float
    simple = {1: base, 2: apply("square", base)}
    if exponent in simple:
        return simple[int(exponent)]
    if exponent == 0:
        return const(1, base.dtype)
    if exponent == 3:
        return apply("square", base) * base
    if is_float and exponent in (0.5, -0.5, -1):
        return apply({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[exponent], base)
    if is_float and exponent == -2:
        return apply("reciprocal", apply("square", base))
    return apply("pow", base, exponent)


@lowers(aten.pow.Tensor_Scalar)
def lower_pow_scalar(builder: Builder, self: Value, exponent: Operand) -> Value:
    """``self`` to a number, in their promoted dtype.

    A Python number is rounded to that dtype first and expanded by `power`; one that is data of the
    graph, or a bool base, takes `lower_pow`.
    """
    if isinstance(exponent, (bool, int, float)) and self.dtype.kind is not Kind.BOOL:
        dtype = result_dtype((self, exponent))
        constant = rounded_operand(exponent, dtype)
        assert isinstance(constant, (int, float))
        return elementwise(builder, lambda x: power(x, constant), self, dtype=dtype)
    return lower_pow(builder, self, exponent)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def lower_pow(builder: Builder, self: Operand, exponent: Operand) -> Value:
    """``self`` to the ``exponent``; both are first rounded to the promoted dtype."""
    return unwidened(builder, _pow, self, exponent)


def _pow(a: Scalar, b: Scalar) -> Scalar:
    if a.dtype.kind is Kind.BOOL:  # False only for 0 to the 1
        return a | ~b
    return apply("pow", a, b)


@lowers(aten.addcmul.default)
def lower_addcmul(
    builder: Builder, self: Value, tensor1: Value, tensor2: Value, *, value: Operand = 1
) -> Value:
    """``self + value · tensor1 · tensor2``, rounded once to the result's dtype."""
    return elementwise(
        builder,
        lambda a, b, c: plus(a, times(scaled(b, value), c)),
        self,
        tensor1,
        tensor2,
    )


@lowers(aten.addcdiv.default)
def lower_addcdiv(
    builder: Builder, self: Value, tensor1: Value, tensor2: Value, *, value: Operand = 1
) -> Value:
    """``self + value · tensor1 / tensor2``, rounded once to the result's dtype."""
    return elementwise(
        builder, lambda a, b, c: plus(a, scaled(b, value) / c), self, tensor1, tensor2
    )


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lower_lerp(builder: Builder, self: Value, end: Value, weight: Operand) -> Value:
    """``self + weight · (end − self)``; where |weight| ≥ ½, ``end − (end − self) · (1 − weight)``.

    As ATen's ``lerp``, it is exact at weights 0 and 1.
    """

    def body(a: Scalar, b: Scalar, w: Scalar) -> Scalar:
        difference = b - a
        near = abs(w) < 0.5
        from_start = a + w * difference
        left = 1 - w
        return where(near, from_start, b - difference * left)

    return elementwise(builder, body, self, end, weight)


@lowers(aten.hypot.default)
def lower_hypot(builder: Builder, self: Value, other: Value) -> Value:
    """``sqrt(self² + other²)``, without an overflow of the squares.

    Infinite if either is infinite, also when the other is NaN.
    """

    def body(a: Scalar, b: Scalar) -> Scalar:
        a, b = abs(a), abs(b)
        high, low = apply("maximum", a, b), apply("minimum", a, b)
        ratio = low / high
        grown = 1 + apply("square", ratio)
        plain = high * apply("sqrt", grown)
        finite = where(apply("eq", low, 0), high, plain)
        finite = where(apply("isinf", b), b, finite)  # also when a is NaN
        return where(apply("isinf", a), a, finite)

    return elementwise(builder, body, self, other)


@lowers(aten.frac.default)
def lower_frac(builder: Builder, self: Value) -> Value:
    """``x − trunc(x)``: the fraction, with the sign of x."""
    return elementwise(builder, lambda x: x - apply("trunc", x), self)


def rounded_operand(arg: Operand, dtype: DType) -> Operand:
    """A Python number rounded to ``dtype`` (for operators that do not compute in a wider type)."""
    is_number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
    if is_number and dtype.is_float and dtype is not dtypes.float64:
        assert isinstance(arg, (int, float))
        return float(literal(arg, dtype).value)
    return arg
