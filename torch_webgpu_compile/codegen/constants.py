"""Operations on constants, computed here: WGSL rejects a constant expression that overflows or is
NaN.

Dividing by a constant zero is spelt out as well: WGSL leaves its result open, PyTorch does not.
"""

from __future__ import annotations

import numpy as np

from ..ir.numeric import convert, numpy_dtype, scalar_op
from ..ir.scalar import Const, Op, Scalar, apply, const

_INFINITY = float("inf")
_NAN = float("nan")


def simplify(node: Op) -> Scalar:
    """``node`` with constants folded at its top, or itself."""
    constants = [a for a in node.args if isinstance(a, Const)]
    if len(constants) == len(node.args):
        return _folded(node, constants)
    if node.name == "where" and isinstance(node.args[0], Const):
        return node.args[1] if node.args[0].value else node.args[2]
    if node.dtype.is_float and node.name in ("div", "floor_divide", "remainder", "fmod"):
        dividend, divisor = node.args
        if isinstance(divisor, Const) and divisor.value == 0:
            return _over_zero(node.name, dividend, divisor)
    return node


def _folded(node: Op, constants: list[Const]) -> Scalar:
    arrays = [np.asarray(c.value, numpy_dtype(c.dtype)) for c in constants]
    with np.errstate(all="ignore"):
        if node.name in ("cast", "bitcast"):
            result = convert(node.name, arrays[0], constants[0].dtype, node.dtype)
        else:
            result = scalar_op(node.name, arrays, node.dtype)
    return const(result.item(), node.dtype)


def _over_zero(name: str, dividend: Scalar, divisor: Const) -> Scalar:
    """a / ±0 is NaN for 0 and NaN, else an infinity; the remainder is always NaN."""
    nan = const(_NAN, dividend.dtype)
    if name in ("remainder", "fmod"):
        return nan
    zero = const(0, dividend.dtype)
    up, down = const(_INFINITY, dividend.dtype), const(-_INFINITY, dividend.dtype)
    if str(divisor.value).startswith("-"):
        up, down = down, up
    negative = apply("where", apply("lt", dividend, zero), down, nan)
    return apply("where", apply("gt", dividend, zero), up, negative)
