"""Floats converted to integers as PyTorch converts them on the CPU, infinities and NaN, too.

A scalar's ``cast`` is for numbers that the integers hold: C++ leaves others open, and WGSL takes
the nearest. ATen's kernels take what x86 processors give: the least integer of 32 bits, of 64 for
int64. Narrower integers are the last bits of one of 32 bits, uint32 those of one of 64 bits.
"""

from __future__ import annotations

from math import inf, isfinite

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Const, Op, Scalar, apply, cast, const, where

_ROUNDED = frozenset({"floor", "ceil", "trunc", "round"})


def to_dtype(body: Scalar, dtype: DType) -> Scalar:
    """``body`` converted to any dtype."""
    if not (body.dtype.is_float and dtype.is_integer):
        return cast(body, dtype)
    if dtype is dtypes.uint32:
        return cast(to_dtype(body, dtypes.int64), dtype)
    limit = 2.0 ** (63 if dtype is dtypes.int64 else 31)
    low, high = _range(body)
    if -limit <= low and high < limit:
        return cast(body, dtype)
    size = cast(body, dtypes.float64 if body.dtype is dtypes.float64 else dtypes.float32)
    is_inside = apply("abs", size) < const(limit, size.dtype)
    least = int(-limit) if dtype.bits >= 32 else 0
    return where(is_inside, cast(body, dtype), const(least, dtype))


def _range(node: Scalar) -> tuple[float, float]:
    """Bounds of a float, as from a clamp: within an integer's range, nothing need be tested.

    NaN is left out: it is as likely to be met, but a clamp was for other numbers.
    """
    match node:
        case Const(value) if isfinite(value):
            return float(value), float(value)
        case Op("cast", (inner,), dtype) if inner.dtype.is_float and dtype.is_float:
            return _range(inner)
        case Op("minimum" | "maximum" as name, (a, b)):
            (low, high), (other_low, other_high) = _range(a), _range(b)
            chosen = min if name == "minimum" else max
            return chosen(low, other_low), chosen(high, other_high)
        case Op(name, (inner,)) if name in _ROUNDED:
            low, high = _range(inner)
            return low - 1, high + 1
    return -inf, inf
