"""Sorting by counting. Source: ATen ``sort``, ``topk``, ``median``, ``kthvalue``.

An element's rank is the number of elements before it in the order; a scatter puts every element at
its rank. In short rows, and in blocks of long ones, ranks are found by comparing all pairs. Sorted
blocks are then merged, many at a time, with a binary search in each for every element.
"""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr, ceildiv
from .builder import Builder, masked
from .convolution import all_of, in_range
from .promotion import compute_dtype
from .reductions import Reducing
from .registry import NotLowered, lowers
from .searching import before, binary_search, order_key
from .value import IndexLike, Value, permute, positions, reshape, slice_dim

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
    body = where(mine, Index(at % block), found)
    total = cast(body, dtypes.int32)
    return builder.reduce("sum", total, values.sizes, (as_expr(FAN),), name="rank")


def _sort(builder: Builder, value: Value, dim: int, descending: bool) -> tuple[Value, Value | None]:
    """Along ``dim``; positions only if the operator's second result is used."""
    if not value.rank:
        return value, Value(dtypes.int64, (), const(0, dtypes.int64))
    return sort_along(builder, value, dim % value.rank, descending, builder.is_used(1))


def sort_along(
    builder: Builder, value: Value, dim: int, descending: bool = False, places: bool = True
) -> tuple[Value, Value | None]:
    """(sorted values, their positions) along ``dim`` ≥ 0; equal values keep their order."""
    values, indices = sort_last(builder, _last(value, dim), descending, places)
    return _back(values, dim), None if indices is None else _back(indices, dim)


@lowers(aten.sort.default)
def lower_sort(
    builder: Builder, self: Value, dim: int = -1, descending: bool = False
) -> tuple[Value, Value | None]:
    """(the elements in order along ``dim``, their int64 positions); ties keep their order.

    NaN counts as the largest. The positions are made only if they are read.
    """
    return _sort(builder, self, dim, descending)


@lowers(aten.sort.stable)
def lower_sort_stable(
    builder: Builder,
    self: Value,
    *,
    stable: bool | None,
    dim: int = -1,
    descending: bool = False,
) -> tuple[Value, Value | None]:
    """`lower_sort`, which is stable in any case."""
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


@lowers(aten.median.dim)
def lower_median(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value | None]:
    """(the lower median along ``dim``, its int64 position); NaN if there is one.

    Of an even number of elements it is the smaller one of the two in the middle.
    """
    return _median(builder, self, dim, keepdim, ignore_nan=False)


@lowers(aten.nanmedian.dim)
def lower_nanmedian(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value | None]:
    """`lower_median` of the elements that are not NaN; NaN only where all are."""
    return _median(builder, self, dim, keepdim, ignore_nan=True)


@lowers(aten.median.default)
def lower_median_all(builder: Builder, self: Value) -> Value:
    """The lower median of all elements, NaN if there is one.

    Raises NotLowered: for an empty tensor.
    """
    return _median_all(builder, self, ignore_nan=False)


@lowers(aten.nanmedian.default)
def lower_nanmedian_all(builder: Builder, self: Value) -> Value:
    """The lower median of all elements that are not NaN.

    Raises NotLowered: for an empty tensor.
    """
    return _median_all(builder, self, ignore_nan=True)


def _median_all(builder: Builder, value: Value, ignore_nan: bool) -> Value:
    if value.is_empty:
        raise NotLowered("the median of nothing")
    flat = reshape(value, [value.numel])
    builder.used = frozenset({0})
    return _median(builder, flat, 0, False, ignore_nan)[0]
