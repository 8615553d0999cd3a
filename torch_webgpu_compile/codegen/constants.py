"""Operations on constants, computed here: WGSL rejects constants that overflow or are NaN.

Drivers simplify operations as if NaN and infinities did not occur (0 · x to 0, x - x to 0, x / x to
1): one operand is made opaque to them. Quotients of sizes and positions, whose last bit decides
where an element comes from, are rounded as PyTorch's are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dtypes
from ..ir.numeric import convert, numpy_dtype, scalar_op
from ..ir.scalar import Const, Index, Load, Masked, Op, Scalar, apply, const, loads_of
from .wgsl.indices import as_index, decide, host_number

# Drivers take an inverse away, and with it the NaN of negative numbers.
_INVERSES = {"exp": "log", "fast_exp": "log", "exp2": "log2", "square": "sqrt"}
# Comparisons, and what they are for two equal numbers.
COMPARISONS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}
_NAN = float("nan")
_LARGEST_DIVISOR = 2.0**126  # of WGSL's division


class Simplifier:
    """Folds constants in scalars: operations on them, and choices that they decide.

    Args:
        constant_of: the constant that a buffer computed in this kernel holds, or None.
    """

    def __init__(self, constant_of: Callable[[Load], Const | None]) -> None:
        self.constant_of = constant_of
        self.found: dict[Scalar, Scalar] = {}

    def __call__(self, node: Scalar) -> Scalar:
        match node:
            case Index(expr) if expr.is_constant:
                return const(expr.constant, node.dtype)
            case Load():
                return self.constant_of(node) or node
            case Masked():
                condition = self(node.condition)
                if isinstance(condition, Const):
                    return self(node.body if condition.value else node.other)
            case Op():
                return self._operation(node)
        return node

    def _operation(self, node: Op) -> Scalar:
        found = self.found.get(node)
        if found is None and host_number(node) is not None:
            found = self.found[node] = node
        if found is None:
            args = tuple(map(self, node.args))
            found = simplify(node if args == node.args else Op(node.name, args, node.dtype))
            if isinstance(found, Op) and found.name in COMPARISONS:
                left, right = map(as_index, found.args)
                if left is not None and right is not None:
                    is_true = decide(found.name, left, right)
                    found = found if is_true is None else const(is_true, found.dtype)
            self.found[node] = self.found[found] = found
        return found


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
        return _of_two(node, *node.args)
    if not node.args[-1].dtype.is_float:
        if _is_nothing(node):
            return const(0, node.dtype)
        if node.name in COMPARISONS and node.args[0] is node.args[1]:
            return const(COMPARISONS[node.name], node.dtype)
    return _without_inverse(node.name, node)


def _of_two(node: Op, left: Scalar, right: Scalar) -> Scalar:
    """An operation on two floats."""
    match node.name:
        case "remainder" | "fmod" if _is_zero(right):
            return const(_NAN, node.dtype)
        case "div" if isinstance(right, Const) and right.value == 1:
            return left
        case "div" if node.dtype is dtypes.float32 and not (_is_zero(right) or loads_of(node)):
            return Op("exact_div", node.args, node.dtype)
        case "mul" | "div" | "floor_divide" if _is_zero(left):
            return Op(node.name, (_opaque(left), right), node.dtype)
        case "mul" | "div" | "floor_divide" if _is_zero(right):
            return Op(node.name, (left, _opaque(right)), node.dtype)
        case "div" if node.dtype is dtypes.float32 and _may_be_vast(left, right):
            return Op("wide_div", node.args, node.dtype)
        case _ if left is right:
            return _of_itself(node, left)
    return node


def _without_detour(node: Op) -> Scalar:
    """A conversion to a wider float and back, or of a bool by way of another dtype."""
    wide = node.args[0]
    if isinstance(wide, Op) and wide.name == "cast" and wide.args[0].dtype is dtypes.bool_:
        return Op("cast", wide.args, node.dtype)
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
        divisor.args[0].dtype.is_float and divisor.args[0].dtype is not dtypes.float16
    )


def _unless_negative(value: Scalar) -> Scalar:
    positive = apply("ge", value, const(0, value.dtype))
    return apply("where", positive, apply("abs", value), const(_NAN, value.dtype))


def _of_itself(node: Op, value: Scalar) -> Scalar:
    """x - x, x / x, √x · √x, the smaller of x and x, and comparisons of x with x."""
    match node.name:
        case "minimum" | "maximum":
            return value
        case "sub" | "div":
            return Op(node.name, (value, _opaque(value)), node.dtype)
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


def _folded(node: Op, constants: list[Const]) -> Scalar:
    arrays = [np.asarray(c.value, numpy_dtype(c.dtype)) for c in constants]
    with np.errstate(all="ignore"):
        if node.name in ("cast", "bitcast"):
            result = convert(node.name, arrays[0], constants[0].dtype, node.dtype)
        else:
            result = scalar_op(node.name, arrays, node.dtype)
    return const(result.item(), node.dtype)
