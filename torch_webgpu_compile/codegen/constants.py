"""Operations on constants, computed here: WGSL rejects constants that overflow or are NaN.

Operations whose result WGSL leaves open, or that drivers simplify as if NaN and infinities did not
occur (0 · x to 0, x - x to 0, x / x to 1), are spelt out as tests of bits. Quotients of sizes and
positions, whose last bit decides where an element comes from, are rounded as PyTorch's are.
"""

from __future__ import annotations

import numpy as np

from .. import dtypes
from ..ir.numeric import convert, numpy_dtype, scalar_op
from ..ir.scalar import Const, Op, Scalar, apply, const, loads_of

# Drivers take an inverse away, and with it the NaN of negative numbers.
_INVERSES = {"exp": "log", "fast_exp": "log", "exp2": "log2", "square": "sqrt"}
# Comparisons, and what they are for two equal numbers.
_ORDERS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
_INFINITY = float("inf")
_NAN = float("nan")


def simplify(node: Op) -> Scalar:
    """``node`` with constants folded at its top, or itself."""
    if node.name == "opaque":
        return node
    constants = [a for a in node.args if isinstance(a, Const)]
    if len(constants) == len(node.args):
        return _folded(node, constants)
    if node.name == "cast":
        return _without_detour(node)
    if node.name == "where" and (isinstance(node.args[0], Const) or node.args[1] is node.args[2]):
        return node.args[2] if _is_zero(node.args[0]) else node.args[1]
    if node.args[-1].dtype.is_float and len(node.args) == 2:
        left, right = node.args
        if node.name in ("div", "floor_divide", "remainder", "fmod") and _is_zero(right):
            return _over_zero(node.name, left, right)
        if node.name == "div" and isinstance(right, Const) and right.value == 1:
            return left
        if node.name == "div" and node.dtype is dtypes.float32 and not loads_of(node):
            return Op("exact_div", node.args, node.dtype)
        if node.name == "div" and _is_zero(left):
            nan = apply("bitwise_or", apply("isnan", right), apply("eq", right, _number(0, right)))
            return apply("where", nan, _number(_NAN, right), _zero_signed_by(right, left))
        if node.name == "mul" and left is not right:
            return _product(node, left, right)
        if left is right:
            return _of_itself(node, left)
        if node.name == "div" and node.dtype is dtypes.float32 and _may_be_vast(left, right):
            return Op("wide_div", node.args, node.dtype)
    if not node.args[-1].dtype.is_float:
        if _is_nothing(node):
            return const(0, node.dtype)
        if node.name in _ORDERS and node.args[0] is node.args[1]:
            return const(_ORDERS[node.name], node.dtype)
    return _without_inverse(node.name, node)


def _without_detour(node: Op) -> Scalar:
    """A conversion to a wider float and back."""
    wide = node.args[0]
    if isinstance(wide, Op) and wide.name == "cast" and wide.dtype.is_float:
        value = wide.args[0]
        if value.dtype is node.dtype and node.dtype.is_float and wide.dtype.bits >= node.dtype.bits:
            return value
    return node


def _without_inverse(name: str, node: Op) -> Scalar:
    """exp(log(x)) and the like; rounding to 16 bits in between is nothing in a kernel."""
    inverse = _INVERSES.get(name)
    inner = node.args[0]
    while inverse and isinstance(inner, Op) and inner.name == "cast":
        if inner.args[0].dtype.compute != node.dtype.compute:
            return node
        inner = inner.args[0]
    if isinstance(inner, Op) and inner.name == inverse and inner.dtype is node.dtype:
        return _unless_negative(inner.args[0])
    return node


def _number(value: float, like: Scalar) -> Const:
    return const(value, like.dtype)


def _is_zero(value: Scalar) -> bool:
    return isinstance(value, Const) and value.value == 0


def _is_negative(value: Scalar) -> bool:
    return str(value.value).startswith("-") if isinstance(value, Const) else False


def _opaque(value: Scalar) -> Scalar:
    """A float, of which drivers know nothing: they know which values are finite, of a bool's 0 and
    1 for one, and so which results are 0, and make 0 of what is multiplied by them.
    """
    return Op("opaque", (value,), value.dtype)


def _may_be_vast(dividend: Scalar, divisor: Scalar) -> bool:
    """Whether a divisor may be beyond what WGSL has GPUs divide by, and it matters."""
    if isinstance(divisor, Const) or (isinstance(dividend, Const) and abs(dividend.value) <= 1):
        return False
    return not (isinstance(divisor, Op) and divisor.name == "cast") or (
        divisor.args[0].dtype.is_float and divisor.args[0].dtype is not dtypes.float16
    )


def _zero_signed_by(value: Scalar, zero: Scalar) -> Scalar:
    """The zero with the sign of ``value`` times that of the constant ``zero``."""
    sign = apply("neg", value) if _is_negative(zero) else value
    return _opaque(apply("copysign", _number(0, value), sign))


def _is_endless(value: Scalar) -> Scalar:
    """Whether a float is NaN or infinite."""
    return apply("bitwise_or", apply("isnan", value), apply("isinf", value))


def _product(node: Op, left: Scalar, right: Scalar) -> Scalar:
    for factor, value in ((left, right), (right, left)):
        if _is_zero(factor):
            return _times_zero(factor, value)
        choice = None if isinstance(value, Const) or _choice_of(value) else _choice_of(factor)
        if choice is not None:
            return _times_choice(choice, value)
    return node


def _times_zero(zero: Scalar, value: Scalar) -> Scalar:
    return apply("where", _is_endless(value), _number(_NAN, value), _zero_signed_by(value, zero))


def _choice_of(value: Scalar) -> tuple[Scalar, Scalar, Scalar] | None:
    """c ? a : b, of constants of which one is 0: as a bool that was converted to a number is."""
    flag = value
    while flag.dtype is not dtypes.bool_ and isinstance(flag, Op) and flag.name == "cast":
        flag = flag.args[0]
    if flag.dtype is dtypes.bool_:
        return flag, _number(1, value), _number(0, value)
    if isinstance(value, Op) and value.name == "where":
        condition, chosen, other = value.args
        if isinstance(chosen, Const) and isinstance(other, Const):
            return (condition, chosen, other) if _is_zero(chosen) or _is_zero(other) else None
    return None


def _times_choice(choice: tuple[Scalar, Scalar, Scalar], value: Scalar) -> Scalar:
    """(c ? a : b) · x, of which drivers make c ? a · x : 0, whatever x, or 0."""
    condition, *numbers = choice
    return apply("where", condition, *(_times_number(number, value) for number in numbers))


def _times_number(number: Scalar, value: Scalar) -> Scalar:
    if _is_zero(number):
        return _times_zero(number, value)
    return value if isinstance(number, Const) and number.value == 1 else apply("mul", value, number)


def _unless_negative(value: Scalar) -> Scalar:
    positive = apply("ge", value, _number(0, value))
    return apply("where", positive, apply("abs", value), _number(_NAN, value))


def _of_itself(node: Op, value: Scalar) -> Scalar:
    """x - x, x / x, √x · √x, the smaller of x and x, and comparisons of x with x."""
    match node.name:
        case "minimum" | "maximum":
            return value
        case "sub":
            return nan_unless_finite(value)
        case "div":
            nan = apply("bitwise_or", _is_endless(value), apply("eq", value, _number(0, value)))
            return _opaque(apply("where", nan, _number(_NAN, value), _number(1, value)))
        case "eq" | "le" | "ge":
            return apply("bitwise_not", apply("isnan", value))
        case "ne":
            return apply("isnan", value)
        case "lt" | "gt":
            return const(False, dtypes.bool_)
        case "mul":
            return _without_inverse("square", node)
    return node


def _is_nothing(node: Op) -> bool:
    """Integers that are 0 whatever their operands: drivers know, and drop what is multiplied."""
    match node:
        case Op("sub" | "bitwise_xor", (left, right)):
            return left is right
        case Op("mul" | "bitwise_and", (left, right)):
            return _is_zero(left) or _is_zero(right)
        case Op("remainder" | "fmod", (_, Const(value=1))):
            return True
    return False


def nan_unless_finite(value: Scalar) -> Scalar:
    """0 for numbers, by bits in float32: what multiplies a constant 0 drivers take for 0, even NaN.

    The exponent of what is not finite is 255, the only one that has a bit 8 when it is increased.
    The NaN has the bits of ``value``: of 0 or one NaN, scaled, NVIDIA's compiler makes 0.
    """
    if value.dtype is not dtypes.float32:
        zero = _number(0, value)
        return _opaque(apply("where", _is_endless(value), _number(_NAN, value), zero))
    u32 = dtypes.uint32
    bits = apply("bitcast", value, dtype=u32)
    exponent = apply("bitwise_and", apply("shift_right", bits, const(23, u32)), const(255, u32))
    endless = apply("shift_right", apply("add", exponent, const(1, u32)), const(8, u32))
    mask = apply("sub", const(0, u32), endless)
    nan = apply("bitwise_or", bits, const(0x7FC00000, u32))
    return _opaque(apply("bitcast", apply("bitwise_and", mask, nan), dtype=value.dtype))


def _folded(node: Op, constants: list[Const]) -> Scalar:
    arrays = [np.asarray(c.value, numpy_dtype(c.dtype)) for c in constants]
    with np.errstate(all="ignore"):
        if node.name in ("cast", "bitcast"):
            result = convert(node.name, arrays[0], constants[0].dtype, node.dtype)
        else:
            result = scalar_op(node.name, arrays, node.dtype)
    return const(result.item(), node.dtype)


def _over_zero(name: str, dividend: Scalar, divisor: Scalar) -> Scalar:
    """a / ±0 is NaN for 0 and NaN, else an infinity; the remainder is always NaN."""
    nan = _number(_NAN, dividend)
    if name in ("remainder", "fmod"):
        return nan
    zero = _number(0, dividend)
    up, down = _number(_INFINITY, dividend), _number(-_INFINITY, dividend)
    if _is_negative(divisor):
        up, down = down, up
    negative = apply("where", apply("lt", dividend, zero), down, nan)
    return apply("where", apply("gt", dividend, zero), up, negative)
