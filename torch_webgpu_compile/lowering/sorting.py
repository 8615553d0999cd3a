"""Sorting, order statistics, and searching in sorted rows.

Source: ATen ``sort``, ``topk``, ``median``, ``mode``, ``searchsorted``, ``bucketize``, ….
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr, upper_bound
from . import radix
from .builder import Builder, as_value, masked
from .promotion import Operand, compute_dtype, promote
from .reductions import Reducing, extreme_along
from .registry import NotLowered, lowers
from .scans import inclusive_scan
from .value import IndexLike, Value, broadcast_index, permute, positions, reshape, zeros

aten = torch.ops.aten


def _last(value: Value, dim: int) -> Value:
    """``dim`` moved to the end."""
    dims = [k for k in range(value.rank) if k != dim] + [dim]
    return permute(value, dims)


def _back(value: Value, dim: int) -> Value:
    """A value with its last dimension moved back to ``dim``."""
    dims = list(range(value.rank - 1))
    dims.insert(dim, value.rank - 1)
    return permute(value, dims)


def sort_last(
    builder: Builder, value: Value, descending: bool, places: bool, bits: int | None = None
) -> tuple[Value, Value | None]:
    """(sorted values, their positions) along the last dimension; positions only if asked for.

    ``bits``: of integers that are never negative, how many they may have.
    """
    taken = _Taken(value, places)
    moved = radix.order(builder, value, descending, taken.payloads, bits=bits)
    return taken.results(builder, moved)


class _Taken:
    """The results of ordering: values of elements, and their int64 positions if asked for.

    The kernel that orders them writes both, if a value is no part of a word. Values that are make
    do with positions, which another kernel follows.
    """

    def __init__(self, value: Value, places: bool) -> None:
        self.value = value
        self.places = places
        self.is_whole = value.dtype.itemsize >= 4

    def payloads(self, place: Scalar) -> list[Scalar]:
        """The payloads of the element at ``place``."""
        value = self.value.at([*positions(self.value.sizes)[:-1], place])
        values = [value] * self.is_whole
        if self.places:
            return [*values, place]
        return values or radix.place_alone(place)

    def results(self, builder: Builder, moved: Sequence[Value]) -> tuple[Value, Value | None]:
        """(the values, their positions) of payloads in order."""
        place = moved[-1] if self.places else None
        if self.is_whole:
            return moved[0], place
        ordered = moved[-1]
        if ordered.is_empty:
            return zeros(ordered.sizes, self.value.dtype), place
        at = [*positions(ordered.sizes)[:-1], ordered.body]
        return builder.pointwise(self.value.at(at), ordered.sizes, name="sorted"), place


def sort_along(
    builder: Builder, value: Value, dim: int, descending: bool = False, places: bool = True
) -> tuple[Value, Value | None]:
    """(sorted values, their positions) along ``dim`` ≥ 0; equal values keep their order."""
    values, indices = sort_last(builder, _last(value, dim), descending, places)
    return _back(values, dim), None if indices is None else _back(indices, dim)


@lowers(aten.sort.default, aten.sort.stable)
def lower_sort(
    builder: Builder,
    self: Value,
    dim: int = -1,
    descending: bool = False,
    *,
    stable: bool | None = None,
) -> tuple[Value, Value | None]:
    """(the elements in order along ``dim``, their int64 positions); ties keep their order.

    NaN counts as the largest. The positions are made only if they are read.
    """
    if not self.rank:
        return self, zeros((), dtypes.int64)
    return sort_along(builder, self, dim % self.rank, descending, builder.is_used(1))


@lowers(aten.topk.default)
def lower_topk(
    builder: Builder,
    self: Value,
    k: IntLike,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Value | None, Value | None]:
    """(the first ``k`` elements along ``dim`` of the sorted tensor, their int64 positions).

    They are sorted whether or not ``sorted`` asks for it. NaN counts as the largest: the smallest
    float is therefore no minimum, of which it is the result.
    """
    if not self.rank:
        return self, zeros((), dtypes.int64)
    dim %= self.rank
    if as_expr(k) is ONE and (largest or not self.dtype.is_float):
        return extreme_along(builder, self, dim, largest)
    value = _last(self, dim)
    taken = _Taken(value, builder.is_used(1))
    moved = radix.first_in_order(builder, value, largest, taken.payloads, as_expr(k))
    values, indices = taken.results(builder, moved)
    return _back(values, dim), None if indices is None else _back(indices, dim)


def _nth(
    builder: Builder, value: Value, dim: int, keepdim: bool, number: Scalar
) -> tuple[Value, Value | None]:
    """(the element that is ``number``-th in order along ``dim``, from 1; its int64 position).

    ``number`` is an int64 over the other dimensions.
    """
    last = _last(value, dim)
    place = radix.nth_in_order(builder, last, number)
    body = last.at([*positions(place.sizes), place.body])
    found = builder.pointwise(body, place.sizes, name="found")
    if keepdim:
        sizes = [ONE if k == dim else size for k, size in enumerate(value.sizes)]
        return reshape(found, sizes), reshape(place, sizes)
    return found, place


@lowers(aten.kthvalue.default)
def lower_kthvalue(
    builder: Builder, self: Value, k: IntLike, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value | None]:
    """(the ``k``-th smallest element along ``dim``, from 1; its int64 position). NaN is largest."""
    if not self.rank:
        return self, zeros((), dtypes.int64)
    return _nth(builder, self, dim % self.rank, keepdim, Index(as_expr(k)))


def _median(
    builder: Builder, value: Value, dim: int, keepdim: bool, ignore_nan: bool
) -> tuple[Value, Value | None]:
    """The lower median; NaN if there is one, or of the numbers alone with ``ignore_nan``."""
    if not value.rank:
        return value, zeros((), dtypes.int64)
    dim %= value.rank
    size = value.sizes[dim]
    number: Scalar = Index((size - 1) // 2 + 1)
    if value.dtype.is_float:
        split = Reducing(value, [dim])
        is_nan = apply("isnan", cast(split.body(), compute_dtype(value.dtype)))
        count = split.reduce(
            builder, "sum", cast(is_nan, dtypes.int64), keepdim=False, name="nans"
        ).body
        numbers = Index(size) - count
        if ignore_nan:
            number = apply("maximum", numbers - 1, 0) // 2 + 1
        else:
            number = where(count > 0, numbers + 1, number)
    return _nth(builder, value, dim, keepdim, number)


def _register_median(name: str, ignore_nan: bool) -> None:
    packet = getattr(aten, name)

    @lowers(packet.dim)
    def lower(
        builder: Builder, self: Value, dim: int, keepdim: bool = False
    ) -> tuple[Value, Value | None]:
        """(the lower median along ``dim``, its int64 position).

        Of an even number of elements it is the smaller one of the two in the middle. NaN if there
        is one; nanmedian is that of the elements that are not NaN, and NaN only where all are.
        """
        return _median(builder, self, dim, keepdim, ignore_nan)

    @lowers(packet.default)
    def lower_all(builder: Builder, self: Value) -> Value:
        """The lower median of all elements. Raises NotLowered: for an empty tensor."""
        if self.is_empty:
            raise NotLowered("the median of nothing")
        builder.used = frozenset({0})
        return _median(builder, reshape(self, [self.numel]), 0, False, ignore_nan)[0]


_register_median("median", ignore_nan=False)
_register_median("nanmedian", ignore_nan=True)


# Rows up to here are compared in full: that many neighbouring loads are as fast as a few steps of a
# binary search, each of which waits for the one before.
_COMPARED = 64


def order_key(scalar: Scalar) -> Scalar:
    """The scalar in a dtype that the comparisons of `before` take: bools as int32, else wide."""
    dtype = dtypes.int32 if scalar.dtype.kind is Kind.BOOL else compute_dtype(scalar.dtype)
    return cast(scalar, dtype)


def before(a: Scalar, b: Scalar) -> Scalar:
    """Whether a comes before b, apart from ties; NaN counts as the largest."""
    less = a < b
    if not a.dtype.is_float:
        return less
    return less | apply("isnan", b) & ~apply("isnan", a)


def binary_search(comes_first: Callable[[Scalar], Scalar], count: Expr) -> Scalar:
    """How many of ``count`` elements satisfy ``comes_first``, which those up to some place do.

    ``comes_first`` is a function of a position in [0, count), an int64. Buffers have fewer than 2³¹
    elements, so that the search is in 32 bits.
    """
    high, size = upper_bound(count), cast(Index(count), dtypes.int32)
    found: Scalar = const(0, dtypes.int32)
    for bit in reversed(range(31 if high is None else high.bit_length())):
        tried = found + (1 << bit)
        last = tried - 1
        fits = tried <= size
        safe = where(fits, last, 0)
        taken = fits & comes_first(cast(safe, dtypes.int64))
        found = where(taken, tried, found)
    return cast(found, dtypes.int64)


def count_before(
    builder: Builder, edges: Value, value: Value, after: bool, sorter: Value | None = None
) -> Value:
    """How many elements of the sorted rows ``edges`` come before each value.

    ``after``: elements equal to the value count too. ``sorter`` holds the positions of the edges in
    order. NaN counts as the largest. The result has the operator's dtype.
    """
    out = builder.out
    if edges.is_empty or value.is_empty:
        return zeros(value.sizes, out.dtype)
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
            return ~before(mine, edge)
        return before(edge, mine)

    count = edges.sizes[-1]
    if count.is_constant and count.constant <= _COMPARED:
        (r,) = positions((count,), "r")
        hits = cast(comes_first(r), dtypes.int32)
        total = builder.reduce("sum", hits, value.sizes, (count,), name="count").body
    else:
        total = binary_search(comes_first, count)
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


def _same(a: Scalar, b: Scalar) -> Scalar:
    """Whether two values are equal, as one NaN is to another."""
    equal = apply("eq", a, b)
    if not a.dtype.is_float:
        return equal
    both = apply("isnan", a) & apply("isnan", b)
    return equal | both


@lowers(aten.mode.default)
def lower_mode(
    builder: Builder, self: Value, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value]:
    """(the most frequent value along ``dim``, of several the smallest; the last position of it).

    In sorted rows equal values are neighbours. An element's distance from the first one of its run
    is largest at the end of the longest run, and its place in the row is where the value is last.

    Raises NotLowered: for rows without elements.
    """
    if not self.rank:
        return self, zeros((), dtypes.int64)
    dim %= self.rank
    if self.is_empty:
        raise NotLowered("the mode of nothing")
    values, places = sort_along(builder, self, dim)
    assert places is not None
    index = list(positions(self.sizes))
    at = Index(index[dim])
    previous = values.at([*index[:dim], index[dim] - 1, *index[dim + 1 :]])
    same = _same(order_key(values.body), order_key(previous))
    inside = Index(index[dim] - 1) >= 0
    repeated = masked(inside, same, False)
    start = builder.pointwise(where(repeated, 0, at), self.sizes, name="start")
    first = inclusive_scan(builder, "maximum", start, dim)
    length = builder.pointwise(at - first.body, self.sizes, name="length")
    split = Reducing(self, [dim])
    most = split.reduce(builder, "maximum", split.body(length), keepdim=True, name="most")
    longest = apply("eq", split.body(length), most.at(broadcast_index(most, split.index())))
    ends = where(longest, Index(split.index()[dim]), Index(self.sizes[dim]))
    chosen = split.reduce(builder, "minimum", ends, keepdim=True, name="end")
    rows = positions(chosen.sizes)
    end = [*rows[:dim], chosen.body, *rows[dim + 1 :]]
    results = [
        builder.pointwise(found.at(end), chosen.sizes, name="mode") for found in (values, places)
    ]
    sizes = chosen.sizes if keepdim else split.sizes
    value, place_of = (reshape(result, sizes) for result in results)
    return value, place_of
