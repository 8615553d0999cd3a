"""`scatter`: updates of single elements, with atomics or as a reduction over the updates."""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Const, Index, Scalar, apply, cast, const
from ..sizes import ONE, Expr, as_symbol, product
from .builder import Builder, masked
from .convolution import all_of, in_range
from .pointwise import plus
from .registry import NotLowered
from .value import IndexLike, Value, positions

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
    """
    if not accumulate:
        return builder.scatter(initial, ranges, index, body, accumulate)
    wide = _accumulator(initial.dtype)
    if wide in _ATOMIC:
        total = builder.scatter(initial.cast(wide), ranges, index, cast(body, wide), True)
    else:
        total = _summed(builder, initial, ranges, index, body)
    if wide is initial.dtype:
        return total
    return builder.pointwise(cast(total.body, initial.dtype), initial.sizes)


def _accumulator(dtype: DType) -> DType:
    """Where sums of ``dtype`` are accumulated: narrow types wrap, or round, once at the end."""
    if dtype.itemsize >= 4:
        return dtype
    return dtypes.float32 if dtype.is_float else dtypes.int32


def _summed(
    builder: Builder,
    initial: Value,
    ranges: Sequence[Expr],
    index: Sequence[IndexLike],
    body: Scalar,
) -> Value:
    """Every element plus the sum of the updates that name it, for types without atomics.

    Where a dimension is addressed by a coordinate of the updates itself, only the updates with that
    coordinate are looked at.
    """
    points = positions(ranges)
    here = positions(initial.sizes)
    at: list[Expr | None] = [None] * len(ranges)
    conditions: list[Scalar] = []
    compared: list[int] = []
    for d, entry in enumerate(index):
        expr = entry.expr if isinstance(entry, Index) else entry
        k = next((k for k, p in enumerate(points) if p is expr and at[k] is None), None)
        if k is None or as_symbol(points[k]) is None:
            compared.append(d)
            continue
        at[k] = here[d]
        conditions += in_range(here[d], ranges[k])
    left = [k for k, place in enumerate(at) if place is None]
    inner = positions([ranges[k] for k in left], "r")
    for k, symbol in zip(left, inner, strict=True):
        at[k] = symbol
    where = [place for place in at if place is not None]
    updates = product(ranges[k] for k in left)
    work = updates * initial.numel
    if not (work.is_constant and work.constant <= _MOST_COMPARISONS):
        cause = f"{initial.dtype.name} has no atomic sum, and {updates} updates are compared"
        raise NotLowered(f"{cause} with each of {initial.numel} elements")

    def moved(scalar: Scalar) -> Scalar:
        return Value(scalar.dtype, tuple(ranges), scalar).at(where)

    hits = []
    for d in compared:
        entry = index[d]
        place = moved(Index(entry) if isinstance(entry, Expr) else cast(entry, dtypes.int64))
        hits.append(apply("eq", place, Index(here[d])))
    zero = const(0, initial.dtype)
    element = cast(moved(body), initial.dtype)
    named = all_of(hits)
    if not isinstance(named, Const):
        element = apply("where", named, element, zero)
    element = masked(all_of(conditions), element, zero)
    sizes = [ranges[k] for k in left] or [ONE]
    total = builder.reduce("sum", element, initial.sizes, sizes, name="sum")
    return builder.pointwise(plus(initial.body, total.body), initial.sizes)
