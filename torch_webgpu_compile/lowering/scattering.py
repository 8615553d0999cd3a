"""`scatter`: updates of single elements, with atomics or as a reduction over the updates."""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Scalar, cast
from ..symbolic.sizes import ONE, Expr
from .builder import Builder
from .ordered_updates import Updates, ordered, summed
from .registry import NotLowered
from .value import IndexLike, Value

# A reduction compares every update with every element that it may change: 2^28 comparisons are
# 10 ms on a large GPU, and about what a host needs for copies both ways of that much data.
_MOST_COMPARISONS = 1 << 28
_ATOMIC = frozenset({dtypes.float32, dtypes.int32, dtypes.uint32, dtypes.int64})


def scatter(
    builder: Builder,
    initial: Value,
    ranges: Sequence[Expr],
    index: Sequence[IndexLike],
    body: Scalar,
    accumulate: bool,
) -> Value:
    """``initial`` with elements set, or increased by ``body``, at every point of ``ranges``.

    16-bit floats accumulate in float32 and are rounded once; a sum of bools is their logical or.

    Raises NotLowered: for sums in a dtype without atomics (float64, uint64) that would need more
    than 2^28 comparisons of an update with an element.
    """
    wide = _accumulator(initial.dtype) if accumulate else initial.dtype
    updates = Updates(initial.cast(wide), tuple(ranges), tuple(index), cast(body, wide))
    total = _updated(builder, updates, accumulate)
    if wide is initial.dtype:
        return total
    return builder.pointwise(cast(total.body, initial.dtype), initial.sizes)


def _accumulator(dtype: DType) -> DType:
    """Where sums of ``dtype`` are accumulated: narrow types wrap, or round, once at the end."""
    if dtype.itemsize >= 4:
        return dtype
    return dtypes.float32 if dtype.is_float else dtypes.int32


def _updated(builder: Builder, updates: Updates, accumulate: bool) -> Value:
    initial = updates.initial
    # Integers have the same sum in every order, and so has an element that one update names.
    exact = updates.competing is ONE or (accumulate and not initial.dtype.is_float)
    if not (exact or updates.is_empty):
        builder.on_deterministic()
        if builder.deterministic:
            return ordered(builder, updates, accumulate)
    if not accumulate or initial.dtype in _ATOMIC:
        return builder.scatter(initial, updates.ranges, updates.index, updates.body, accumulate)
    work = updates.competing * initial.numel
    if not (work.is_constant and work.constant <= _MOST_COMPARISONS):
        cause = f"{initial.dtype.name} has no atomic sum, and {updates.competing} updates are"
        raise NotLowered(f"{cause} compared with each of {initial.numel} elements")
    return summed(builder, updates)
