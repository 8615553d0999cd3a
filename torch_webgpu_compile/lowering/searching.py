"""Searching in sorted rows. Source: ATen ``searchsorted``, ``bucketize``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import Expr, upper_bound
from .builder import Builder, as_value
from .promotion import Operand, compute_dtype, promote
from .registry import lowers
from .value import IndexLike, Value, positions

aten = torch.ops.aten

# Rows up to here are compared in full: that many neighbouring loads are as fast as a few steps of a
# binary search, each of which waits for the one before.
_COMPARED = 64


def order_key(scalar: Scalar) -> Scalar:
    """The scalar in a dtype that the comparisons of `before` take: bools as int32, else wide."""
    dtype = dtypes.int32 if scalar.dtype.kind is Kind.BOOL else compute_dtype(scalar.dtype)
    return cast(scalar, dtype)


def before(a: Scalar, b: Scalar, descending: bool) -> Scalar:
    """Whether a comes before b, apart from ties; NaN counts as the largest."""
    name = "gt" if descending else "lt"
    less = apply(name, a, b)
    if not a.dtype.is_float:
        return less
    first, second = (a, b) if descending else (b, a)
    nan = apply("isnan", first) & ~apply("isnan", second)
    return less | nan


def binary_search(
    comes_first: Callable[[Scalar], Scalar], count: Scalar, most: Expr | None = None
) -> Scalar:
    """How many of ``count`` elements satisfy ``comes_first``, which those up to some place do.

    Args:
        comes_first: of a position in [0, count), an int64.
        count: an int64, at most ``most``.
    """
    high = None if most is None else upper_bound(most)
    found: Scalar = const(0, dtypes.int64)
    for bit in reversed(range(31 if high is None else high.bit_length())):
        tried = found + (1 << bit)
        last = tried - 1
        fits = tried <= count
        safe = where(fits, last, 0)
        taken = fits & comes_first(safe)
        found = where(taken, tried, found)
    return found


def count_before(
    builder: Builder,
    edges: Value,
    value: Value,
    after: bool,
    sorter: Value | None = None,
) -> Value:
    """How many elements of the sorted rows ``edges`` come before each value.

    ``after``: elements equal to the value count too. ``sorter`` holds the positions of the edges in
    order. NaN counts as the largest. The result has the operator's dtype.
    """
    out = builder.out
    if edges.is_empty or value.is_empty:
        return Value(out.dtype, value.sizes, const(0, out.dtype))
    index = positions(value.sizes)
    rows = index[:-1] if edges.rank > 1 else ()
    common = promote(value.dtype, edges.dtype)
    assert common is not None
    mine = order_key(cast(value.body, common))

    def comes_first(position: IndexLike) -> Scalar:
        at = position if sorter is None else sorter.at([*rows, position])
        edge = order_key(cast(edges.at([*rows, at]), common))
        # NaN sorts last: an edge is before NaN unless it is NaN and ties count as after.
        if after:
            return ~before(mine, edge, False)
        return before(edge, mine, False)

    count = edges.sizes[-1]
    if count.is_constant and count.constant <= _COMPARED:
        (r,) = positions((count,), "r")
        hits = cast(comes_first(r), dtypes.int32)
        total = builder.reduce("sum", hits, value.sizes, (count,), name="count").body
    else:
        total = binary_search(comes_first, Index(count), count)
    return builder.pointwise(cast(total, out.dtype), value.sizes)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def lower_searchsorted(
    builder: Builder,
    sorted_sequence: Value,
    self: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """How many elements of each sorted row come before a value: int64, or int32 if asked for.

    The rows are the last dimension of ``sorted_sequence``, which is one row for all values if it is
    a vector. With ``right`` (or ``side="right"``), elements equal to the value count too.
    ``sorter`` gives the order of rows that are not sorted. NaN counts as the largest.
    """
    after = right or side == "right"
    return count_before(builder, sorted_sequence, _tensor(self, sorted_sequence), after, sorter)


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def lower_bucketize(
    builder: Builder,
    self: Operand,
    boundaries: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Value:
    """How many ``boundaries`` (a sorted vector) are below each value; with ``right``, not above it.

    NaN counts as the largest.
    """
    return count_before(builder, boundaries, _tensor(self, boundaries), right)


def _tensor(value: Operand, like: Value) -> Value:
    """A number in the dtype of the edges, or in float32 where it is not whole."""
    if isinstance(value, Value):
        return value
    dtype = dtypes.float32 if isinstance(value, float) and not like.dtype.is_float else like.dtype
    return as_value(value, (), dtype)
