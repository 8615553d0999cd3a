"""Elementwise arithmetic, comparisons, logic and selection.

Source: ATen schemas of the same names, and TensorIterator's type promotion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Scalar, apply, cast, const, where
from ..symbolic.sizes import Expr
from ..torch_private import OpOverload
from .builder import Builder, operand
from .promotion import Operand, compute_dtype, float_dtype, result_dtype, rounded_to
from .registry import lowers
from .symbols import literal
from .value import Value

aten = torch.ops.aten
Body = Callable[..., Scalar]
Number = float | Scalar
"""An argument that is a number: a Python one, or one that is data of the graph."""


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


def lowers_elementwise(*overloads: OpOverload, to_float: bool = False) -> Callable[[Body], Body]:
    """Registers a function of single elements as the lowering of elementwise operators.

    Its first parameters, annotated as `Scalar`, are the operator's tensors (or numbers) as
    `elementwise` gives them; the others are the arguments that follow, where a number that is data
    of the graph is a `Scalar` of the same dtype. Gives the function itself.

    Args:
        to_float: whether integers and bools are computed in the default float dtype.
    """

    def register(body: Body) -> Body:
        count = list(body.__annotations__.values()).count("Scalar") - 1  # without the result's

        def lower(builder: Builder, *arguments: Any, **options: Any) -> Value:
            operands, rest = arguments[:count], arguments[count:]
            dtype = float_dtype(result_dtype(operands)) if to_float else None

            def applied(*scalars: Scalar) -> Scalar:
                def given(option: Any) -> Any:
                    is_data = isinstance(option, (Value, Expr))
                    return operand(option, (), scalars[0].dtype) if is_data else option

                named = {name: given(option) for name, option in options.items()}
                return body(*scalars, *map(given, rest), **named)

            return elementwise(builder, applied, *operands, dtype=dtype)

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
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value) -> Value:
        """One scalar op per element.

        A ``to_float`` operator computes integers and bools in the default float; rounding of
        integers, and abs and sign of bools, return ``self``.
        """
        unchanged = not self.dtype.is_float and name in ("floor", "ceil", "trunc", "round")
        positive = name in ("abs", "sign") and self.dtype is dtypes.bool_
        if unchanged or positive:
            return self
        dtype = float_dtype(self.dtype) if to_float else self.dtype
        return elementwise(builder, lambda x: apply(name, x), self, dtype=dtype)


for _name in _FLOAT_UNARY.split():
    _register_unary(_name, to_float=True)
for _name in _SAME_UNARY.split():
    _register_unary(_name, to_float=False)


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


def scaled(value: Scalar, alpha: Number | Operand) -> Scalar:
    """alpha · value, in the value's dtype; of bools, alpha & value."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return value
    factor = operand(alpha, (), value.dtype) if isinstance(alpha, (Value, Expr)) else alpha
    return apply("bitwise_and" if value.dtype is dtypes.bool_ else "mul", value, factor)


@lowers_elementwise(aten.add.Tensor, aten.add.Scalar)
def add(a: Scalar, b: Scalar, alpha: Number = 1) -> Scalar:
    """``a + alpha · b`` in the promoted dtype; of bools, ``a | (alpha & b)``."""
    return plus(a, scaled(b, alpha))


def plus(a: Scalar, b: Scalar) -> Scalar:
    """a + b, logical or of bools."""
    return apply("bitwise_or" if a.dtype is dtypes.bool_ else "add", a, b)


@lowers_elementwise(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Scalar, b: Scalar, alpha: Number = 1) -> Scalar:
    """``a − alpha · b`` in the promoted dtype; integers wrap."""
    return a - scaled(b, alpha)


@lowers_elementwise(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(a: Scalar, b: Scalar, alpha: Number = 1) -> Scalar:
    """``b − alpha · a`` in the promoted dtype; integers wrap."""
    return b - scaled(a, alpha)


@lowers_elementwise(aten.mul.Tensor, aten.mul.Scalar)
def times(a: Scalar, b: Scalar) -> Scalar:
    """``a · b`` in the promoted dtype; integers wrap, bools are and-ed."""
    return apply("bitwise_and" if a.dtype is dtypes.bool_ else "mul", a, b)


@lowers_elementwise(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, to_float=True)
def div(a: Scalar, b: Scalar) -> Scalar:
    """``a / b``; integers and bools are divided in the default float dtype."""
    return a / b


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def lower_div_mode(
    builder: Builder, self: Operand, other: Operand, *, rounding_mode: str | None = None
) -> Value:
    """``self / other``, rounded towards 0 (``"trunc"``) or towards −∞ (``"floor"``).

    Rounded divisions of integers stay integers. Without a mode it is `div`.
    """
    common = result_dtype((self, other))
    if rounding_mode is None:
        return elementwise(builder, div, self, other, dtype=float_dtype(common))
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


def register_binary(operator: str, name: str, overloads: str, to_float: bool = False) -> None:
    """Registers the scalar op ``name`` as the lowering of an operator of two operands."""
    packet = getattr(aten, operator)
    found = (getattr(packet, overload) for overload in overloads.split())

    @lowers_elementwise(*found, to_float=to_float)
    def body(a: Scalar, b: Scalar) -> Scalar:
        """A scalar op of two operands in their promoted dtype; ``to_float``: in its float dtype."""
        return apply(name, a, b)


_register_unwidened("remainder", "Tensor Scalar Scalar_Tensor")
_register_unwidened("fmod", "Tensor Scalar")
register_binary("atan2", "atan2", "default", to_float=True)
register_binary("copysign", "copysign", "Tensor Scalar", to_float=True)
register_binary("nextafter", "nextafter", "default")
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    register_binary(_name, _name, "Tensor Scalar Scalar_Tensor")
for _side, _dunder in (("left", "__lshift__"), ("right", "__rshift__")):
    _name = f"shift_{_side}"
    register_binary(f"bitwise_{_side}_shift", _name, "Tensor Tensor_Scalar Scalar_Tensor")
    register_binary(_dunder, _name, "Scalar Tensor")


@lowers_elementwise(aten.bitwise_not.default)
def bitwise_not(x: Scalar) -> Scalar:
    """All bits inverted; of bools, the logical not."""
    return ~x


@lowers_elementwise(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def smaller(a: Scalar, b: Scalar) -> Scalar:
    """The minimum, NaN if either is NaN; logical and of bools."""
    return apply("bitwise_and" if a.dtype is dtypes.bool_ else "minimum", a, b)


@lowers_elementwise(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def larger(a: Scalar, b: Scalar) -> Scalar:
    """The maximum, NaN if either is NaN; logical or of bools."""
    return apply("bitwise_or" if a.dtype is dtypes.bool_ else "maximum", a, b)


@lowers_elementwise(aten.fmin.default)
def fmin(a: Scalar, b: Scalar) -> Scalar:
    """The smaller element; where one of the two is NaN, the other one."""
    return _ignoring_nan(smaller, a, b)


@lowers_elementwise(aten.fmax.default)
def fmax(a: Scalar, b: Scalar) -> Scalar:
    """The larger element; where one of the two is NaN, the other one."""
    return _ignoring_nan(larger, a, b)


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
    if isinstance(exponent, (bool, int, float)) and self.dtype is not dtypes.bool_:
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
    if a.dtype is dtypes.bool_:  # False only for 0 to the 1
        return a | ~b
    return apply("pow", a, b)


@lowers_elementwise(aten.addcmul.default)
def addcmul(a: Scalar, b: Scalar, c: Scalar, *, value: Number = 1) -> Scalar:
    """``a + value · b · c``, rounded once to the result's dtype."""
    return plus(a, times(scaled(b, value), c))


@lowers_elementwise(aten.addcdiv.default)
def addcdiv(a: Scalar, b: Scalar, c: Scalar, *, value: Number = 1) -> Scalar:
    """``a + value · b / c``, rounded once to the result's dtype."""
    return plus(a, scaled(b, value) / c)


@lowers_elementwise(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Scalar, b: Scalar, w: Scalar) -> Scalar:
    """``a + w · (b − a)``; where |w| ≥ ½, ``b − (b − a) · (1 − w)``.

    As ATen's ``lerp``, it is exact at weights 0 and 1.
    """
    difference = b - a
    return where(abs(w) < 0.5, a + w * difference, b - difference * (1 - w))


@lowers_elementwise(aten.hypot.default)
def hypot(a: Scalar, b: Scalar) -> Scalar:
    """``sqrt(a² + b²)``, whose squares powers of 2 keep from overflow and underflow.

    Infinite if either is infinite, also when the other is NaN.
    """
    a, b = abs(a), abs(b)
    high, low = apply("maximum", a, b), apply("minimum", a, b)
    large, small, shift = (511, -484, 538) if a.dtype is dtypes.float64 else (63, -50, 76)
    up, down, one = (const(2.0**power, a.dtype) for power in (shift, -shift, 0))
    is_large, is_small = apply("gt", high, 2.0**large), apply("lt", high, 2.0**small)
    scale = where(is_large, down, where(is_small, up, one))
    back = where(is_large, up, where(is_small, down, one))
    squares = apply("square", high * scale) + apply("square", low * scale)
    plain = apply("sqrt", squares) * back
    finite = where(apply("eq", low, 0), high, plain)
    finite = where(apply("isinf", b), b, finite)  # also when a is NaN
    return where(apply("isinf", a), a, finite)


@lowers_elementwise(aten.frac.default)
def frac(x: Scalar) -> Scalar:
    """``x − trunc(x)``: the fraction, with the sign of x."""
    return x - apply("trunc", x)


def rounded_operand(arg: Operand, dtype: DType) -> Operand:
    """A Python number rounded to ``dtype`` (for operators that do not compute in a wider type)."""
    is_number = isinstance(arg, (int, float)) and not isinstance(arg, bool)
    if is_number and dtype.is_float and dtype is not dtypes.float64:
        assert isinstance(arg, (int, float))
        return float(literal(arg, dtype).value)
    return arg


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _register_unwidened(_name, "Tensor Scalar")


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


@lowers_elementwise(aten.heaviside.default)
def heaviside(x: Scalar, at_zero: Scalar) -> Scalar:
    """0 below 0, 1 above, and ``at_zero`` at 0; NaN gives 0."""
    return where(apply("eq", x, 0), at_zero, cast(x > 0, x.dtype))
