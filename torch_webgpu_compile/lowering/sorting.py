"""Sorting by counting, and searching in sorted rows.

Source: ATen ``sort``, ``topk``, ``median``, ``mode``, ``searchsorted``, ``bucketize``, ….

An element's rank is the number of elements before it in the order; a scatter puts every element at
its rank. In short rows, and in blocks of long ones, ranks are found by comparing all pairs. Sorted
blocks are then merged, many at a time, with a binary search in each for every element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr, ceildiv, upper_bound
from .builder import Builder, as_value, masked
from .convolution import all_of, in_range
from .promotion import Operand, compute_dtype, promote
from .reductions import Reducing
from .registry import NotLowered, lowers
from .scans import inclusive_scan
from .value import IndexLike, Value, broadcast_index, permute, positions, reshape, slice_dim, zeros

aten = torch.ops.aten

# n² comparisons a row: at 4096 that is 16 M, about the work of a 256³ matrix product.
LONGEST_ROW = 4096
# Longer rows than this are sorted in blocks. A million elements are 512 comparisons each, then 8
# searches of 10 steps, 8 of 13, ….
WHOLE = 2048
BLOCK = 512
FAN = 8
# Where the length is not known when compiling, the blocks are a 512th of it: two thousand
# comparisons for each of a million elements, but only three merges where a row is short.
SYMBOLIC_MERGES = 3


def _last(value: Value, dim: int) -> Value:
    """``dim`` moved to the end."""
    dims = [k for k in range(value.rank) if k != dim] + [dim]
    return permute(value, dims)


def _back(value: Value, dim: int) -> Value:
    dims = list(range(value.rank - 1))
    dims.insert(dim, value.rank - 1)
    return permute(value, dims)


def ranks(builder: Builder, value: Value, descending: bool, block: Expr) -> Value:
    """Each element's position in its block of the last dimension when that is sorted.

    Ties keep their order.
    """
    size = value.sizes[-1]
    *rows, at = positions(value.sizes)
    (r,) = positions((block,), "r")
    place = r if block is size else at // block * block + r
    inside = all_of(in_range(place, size))
    mine, other = order_key(value.body), order_key(value.at([*rows, place]))
    tied = ~(before(mine, other, descending) | before(other, mine, descending))
    earlier = Index(place) < Index(at)
    first = before(other, mine, descending) | (tied & earlier)
    body = masked(inside, cast(first, dtypes.int32), 0)
    return builder.reduce("sum", body, value.sizes, (block,), name="rank")


def sort_last(
    builder: Builder, value: Value, descending: bool, places: bool
) -> tuple[Value, Value | None]:
    """(sorted values, their positions) along the last dimension; positions only if asked for."""
    size = value.sizes[-1]
    at = positions(value.sizes)[-1]
    starts = Value(dtypes.int64, value.sizes, Index(at)) if places else None
    if value.is_empty or size is ONE:
        return value, starts
    block, merges = _blocks(size)
    rank = cast(ranks(builder, value, descending, block).body, dtypes.int64)
    place = rank if block is size else Index(at // block * block) + rank
    values, indices = _moved(builder, value, starts, place)
    for _ in range(merges):
        rank = cast(_merged(builder, values, descending, block).body, dtypes.int64)
        block = block * FAN
        place = Index(at // block * block) + rank
        values, indices = _moved(builder, values, indices, place)
    return values, indices


def _blocks(size: Expr) -> tuple[Expr, int]:
    """(the length of blocks that are sorted by comparing all pairs, how often they are merged)."""
    if not size.is_constant:
        return ceildiv(size, FAN**SYMBOLIC_MERGES), SYMBOLIC_MERGES
    if size.constant <= WHOLE:
        return size, 0
    merges, sorted_length = 0, BLOCK
    while sorted_length < size.constant:
        merges, sorted_length = merges + 1, sorted_length * FAN
    return as_expr(BLOCK), merges


def _moved(
    builder: Builder, values: Value, indices: Value | None, place: Scalar
) -> tuple[Value, Value | None]:
    """Both with every element at ``place`` in its row."""
    index: list[IndexLike] = [*positions(values.sizes)[:-1], place]

    def moved(value: Value) -> Value:
        return builder.scatter(value, value.sizes, index, value.body, accumulate=False)

    return moved(values), None if indices is None else moved(indices)


def _merged(builder: Builder, values: Value, descending: bool, block: Expr) -> Value:
    """Each element's position when `FAN` sorted blocks become one.

    It is its position in its own block and, for every other block, the number of elements that come
    before it there; of equal elements those in earlier blocks do.
    """
    size = values.sizes[-1]
    *rows, at = positions(values.sizes)
    (r,) = positions((as_expr(FAN),), "r")
    own = at // block % FAN
    start = (at // (block * FAN) * FAN + r) * block
    key = order_key(values.body)
    earlier = Index(r) < Index(own)

    def comes_first(position: Scalar) -> Scalar:
        place = apply("minimum", Index(start) + position, Index(size - 1))
        other = order_key(values.at([*rows, place]))
        not_after = ~before(key, other, descending)
        return where(earlier, not_after, before(other, key, descending))

    left = apply("minimum", Index(size - start), Index(block))
    found = binary_search(comes_first, apply("maximum", left, 0), block)
    mine = apply("eq", Index(r), Index(own))
    total = cast(where(mine, Index(at % block), found), dtypes.int32)
    return builder.reduce("sum", total, values.sizes, (as_expr(FAN),), name="rank")


def _sort(builder: Builder, value: Value, dim: int, descending: bool) -> tuple[Value, Value | None]:
    """Along ``dim``; positions only if the operator's second result is used."""
    if not value.rank:
        return value, zeros((), dtypes.int64)
    return sort_along(builder, value, dim % value.rank, descending, builder.is_used(1))


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
    return _sort(builder, self, dim, descending)


@lowers(aten.topk.default)
def lower_topk(
    builder: Builder,
    self: Value,
    k: IntLike,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Value, Value | None]:
    """(the first ``k`` elements along ``dim`` of the sorted tensor, their int64 positions).

    They are sorted whether or not ``sorted`` asks for it. NaN counts as the largest.
    """
    values, indices = _sort(builder, self, dim, largest)
    if not self.rank:
        return values, indices
    count = as_expr(k)
    return (
        slice_dim(values, dim, 0, count),
        None if indices is None else slice_dim(indices, dim, 0, count),
    )


def _pick(value: Value, dim: int, keepdim: bool, at: Expr) -> Value:
    picked = slice_dim(value, dim, at, ONE)
    if keepdim:
        return picked
    return reshape(picked, [s for k, s in enumerate(picked.sizes) if k != dim % value.rank])


@lowers(aten.kthvalue.default)
def lower_kthvalue(
    builder: Builder, self: Value, k: IntLike, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value | None]:
    """(the ``k``-th smallest element along ``dim``, from 1; its int64 position). NaN is largest."""
    values, indices = _sort(builder, self, dim, False)
    if not self.rank:
        return values, indices
    at = as_expr(k) - 1
    return (
        _pick(values, dim, keepdim, at),
        None if indices is None else _pick(indices, dim, keepdim, at),
    )


def _median(
    builder: Builder, value: Value, dim: int, keepdim: bool, ignore_nan: bool
) -> tuple[Value, Value | None]:
    """The lower median; NaN if there is one, or of the numbers alone with ``ignore_nan``."""
    if not value.rank:
        return _sort(builder, value, dim, False)
    dim %= value.rank
    values, indices = _sort(builder, value, dim, False)
    size = value.sizes[dim]
    at: Scalar = Index((size - 1) // 2)
    if value.dtype.is_float:
        i64 = dtypes.int64
        split = Reducing(value, [dim])
        is_nan = cast(apply("isnan", cast(split.body(), compute_dtype(value.dtype))), i64)
        count = split.reduce(builder, "sum", is_nan, keepdim=False, name="nans").body
        numbers = Index(size) - count
        if ignore_nan:
            last = apply("maximum", numbers - 1, 0)
            at = last // 2
        else:
            any_nan = count > 0
            at = where(any_nan, numbers, at)
    sizes = tuple(s for k, s in enumerate(value.sizes) if k != dim)
    shape = tuple(ONE if k == dim else s for k, s in enumerate(value.sizes))
    results: list[Value | None] = []
    for found in (values, indices):
        if found is None:
            results.append(None)
            continue
        places: list[IndexLike] = list(positions(sizes))
        places.insert(dim, at)
        picked = builder.pointwise(found.at(places), sizes, name="median")
        results.append(reshape(picked, shape) if keepdim else picked)
    first = results[0]
    assert first is not None
    return first, results[1]


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
