"""Operations whose NaN, infinities or digits drivers lose, written so that they keep them.

Drivers simplify as if NaN and infinities did not occur: 0 · x to 0, x - x to 0, exp(log x) to x.
One operand is made opaque to them, or the result is spelled out. Each function here takes one
operation whose operands are simplified already, and returns another one, or None.
"""

from __future__ import annotations

from ... import dtypes
from ...ir.folding import COMPARISONS
from ...ir.scalar import Const, Masked, Op, Scalar, apply, const, loads_of
from .real_numbers import number

# Drivers take an inverse away, and with it the NaN of negative numbers.
_INVERSES = {"exp": "log", "fast_exp": "log", "exp2": "log2", "square": "sqrt"}
_NAN = float("nan")
_LARGEST_DIVISOR = 2.0**126  # of WGSL's division


def remainder_by_zero(node: Scalar) -> Scalar | None:
    """NaN for the remainder of a float by a constant 0."""
    match node:
        case Op("remainder" | "fmod", (_, Const(value=0)), dtype) if dtype.is_float:
            return const(_NAN, dtype)
    return None


def exact_quotient(node: Scalar) -> Scalar | None:
    """Quotients of sizes and positions, whose last bit decides where an element comes from."""
    match node:
        case Op("div", (_, right), dtypes.float32) if not (_is_zero(right) or loads_of(node)):
            return Op("exact_div", node.args, node.dtype)
    return None


def times_zero(node: Scalar) -> Scalar | None:
    """0 · x, 0 / x and x / 0 with a 0 of which the driver knows nothing."""
    match node:
        case Op("mul" | "div" | "floor_divide", (left, right), dtype) if dtype.is_float:
            if _is_zero(left):
                return Op(node.name, (_opaque(left), right), dtype)
            if _is_zero(right):
                return Op(node.name, (left, _opaque(right)), dtype)
    return None


def vast_divisor(node: Scalar) -> Scalar | None:
    """Quotients by divisors that may be beyond 2¹²⁶, and matter."""
    match node:
        case Op("div", (left, right), dtypes.float32) if _may_be_vast(left, right):
            return Op("wide_div", node.args, node.dtype)
    return None


def of_itself(node: Scalar) -> Scalar | None:
    """x - x, x / x, the smaller of x and x, and comparisons of x with x."""
    match node:
        case Op(name, (value, other), dtype) if value is other and value.dtype.is_float:
            match name:
                case "minimum" | "maximum":
                    return value
                case "sub" | "div":
                    return Op(name, (value, _opaque(value)), dtype)
                case "lt" | "gt":
                    return const(False, dtypes.bool_)
                case _ if name in COMPARISONS:
                    is_nan = apply("isnan", value)
                    return is_nan if name == "ne" else apply("bitwise_not", is_nan)
    return None


def known_zero(node: Scalar) -> Scalar | None:
    """0 for integers that are 0 whatever their operands: a driver knows, and a float that they
    become is not a choice that it sees through."""
    match node:
        case Op("sub" | "bitwise_xor", (left, right)) if not left.dtype.is_float:
            return const(0, node.dtype) if left is right else None
        case Op("mul" | "bitwise_and", (left, right)) if not left.dtype.is_float:
            return const(0, node.dtype) if _is_zero(left) or _is_zero(right) else None
        case Op("remainder" | "fmod", (left, Const(value=1))) if not left.dtype.is_float:
            return const(0, node.dtype)
    return None


def inverse(node: Scalar) -> Scalar | None:
    """exp(log x), √x · √x and the like: |x|, or NaN where x is negative.

    Rounding to 16 bits in between is nothing in a kernel.
    """
    if not isinstance(node, Op):
        return None
    is_square = node.name == "mul" and node.args[0] is node.args[1] and node.dtype.is_float
    wanted = _INVERSES.get("square" if is_square else node.name)
    inner = node.args[0]
    while wanted and isinstance(inner, Op) and inner.name == "cast":
        if inner.args[0].dtype.compute != node.dtype.compute:
            return None
        inner = inner.args[0]
    if not isinstance(inner, Op) or inner.name != wanted or inner.dtype is not node.dtype:
        return None
    (value,) = inner.args
    positive = apply("ge", value, const(0, value.dtype))
    return apply("where", positive, apply("abs", value), const(_NAN, value.dtype))


def chosen_number(node: Scalar) -> Scalar | None:
    """A choice of a number of which the driver knows nothing.

    Of a choice between literals a driver knows the values. If one is 0, it drops a product with the
    choice, although the other factor may be infinite.
    """
    match node:
        case Op("where", (condition, *chosen), dtype):
            hidden = tuple(_opaque(c) if number(c) is not None else c for c in chosen)
            return Op("where", (condition, *hidden), dtype)
        case Masked(condition, body, other) if number(other) is not None:
            return Masked(condition, body, _opaque(other))
    return None


def _is_zero(value: Scalar) -> bool:
    return isinstance(value, Const) and value.value == 0


def _opaque(value: Scalar) -> Scalar:
    """A float of which drivers know nothing: not that it is finite, as a bool's 0 and 1 are."""
    return Op("opaque", (value,), value.dtype)


def _may_be_vast(dividend: Scalar, divisor: Scalar) -> bool:
    """Whether a divisor may be beyond what WGSL has GPUs divide by, and it matters."""
    if isinstance(divisor, Const):
        return abs(divisor.value) > _LARGEST_DIVISOR
    if isinstance(dividend, Const) and abs(dividend.value) <= 1:
        return False
    return not (isinstance(divisor, Op) and divisor.name == "cast") or (
        divisor.args[0].dtype.is_float and divisor.args[0].dtype.name != dtypes.float16.name
    )
