"""Sorting of short rows by counting. Source: ATen ``sort``, ``topk``, ``median``, ``kthvalue``.

An element's rank is the number of elements before it in the order, found by comparing all pairs of
a row; a scatter then puts every element at its rank. Longer rows go to the host.
"""

from __future__ import annotations

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..sizes import ONE, Expr, IntLike, as_expr
from .builder import Builder
from .promotion import compute_dtype, promote
from .reductions import Reducing
from .registry import NotLowered, lowers
from .value import IndexLike, Value, permute, positions, reshape, slice_dim

aten = torch.ops.aten

# n² comparisons a row: at 4096 that is 16 M, about the work of a 256³ matrix product.
LONGEST_ROW = 4096


def _last(value: Value, dim: int) -> Value:
    """``dim`` moved to the end."""
    dims = [k for k in range(value.rank) if k != dim] + [dim]
    return permute(value, dims)


def _back(value: Value, dim: int) -> Value:
    dims = list(range(value.rank - 1))
    dims.insert(dim, value.rank - 1)
    return permute(value, dims)


def _before(a: Scalar, b: Scalar, descending: bool) -> Scalar:
    """Whether a comes before b, apart from ties; NaN counts as the largest."""
    name = "gt" if descending else "lt"
    less = apply(name, a, b)
    if not a.dtype.is_float:
        return less
    first, second = (a, b) if descending else (b, a)
    nan = apply("bitwise_and", apply("isnan", first), apply("bitwise_not", apply("isnan", second)))
    return apply("bitwise_or", less, nan)


def ranks(builder: Builder, value: Value, descending: bool) -> Value:
    """Each element's position in its (last dimension's) row when sorted; ties keep their order."""
    size = value.sizes[-1]
    *rows, at = positions(value.sizes)
    (r,) = positions((size,), "r")
    dtype = compute_dtype(value.dtype)
    if value.dtype.kind is Kind.BOOL:
        dtype = dtypes.int32
    mine = cast(value.body, dtype)
    other = cast(value.at([*rows, r]), dtype)
    earlier = apply("lt", Index(r), Index(at))
    tied = apply(
        "bitwise_not",
        apply("bitwise_or", _before(mine, other, descending), _before(other, mine, descending)),
    )
    first = apply(
        "bitwise_or", _before(other, mine, descending), apply("bitwise_and", tied, earlier)
    )
    return builder.reduce("sum", cast(first, dtypes.int32), value.sizes, (size,), name="rank")


def sort_last(builder: Builder, value: Value, descending: bool) -> tuple[Value, Value | None]:
    """(sorted values, their positions) along the last dimension; positions only if used."""
    size = value.sizes[-1]
    if not (size.is_constant and size.constant <= LONGEST_ROW):
        raise NotLowered(f"sorting rows of {size} elements: at most {LONGEST_ROW} here")
    if value.is_empty or size is ONE:
        return value, Value(dtypes.int64, value.sizes, const(0, dtypes.int64))
    rank = ranks(builder, value, descending)
    *rows, at = positions(value.sizes)
    index: list[IndexLike] = [*rows, cast(rank.body, dtypes.int64)]
    sizes = value.sizes
    zeros = Value(value.dtype, sizes, const(0, value.dtype))
    values = builder.scatter(zeros, sizes, index, value.body, accumulate=False)
    if not builder.is_used(1):
        return values, None
    starts = Value(dtypes.int64, sizes, const(0, dtypes.int64))
    indices = builder.scatter(starts, sizes, index, Index(at), accumulate=False)
    return values, indices


def _sort(builder: Builder, value: Value, dim: int, descending: bool) -> tuple[Value, Value | None]:
    if not value.rank:
        return value, Value(dtypes.int64, (), const(0, dtypes.int64))
    dim %= value.rank
    values, indices = sort_last(builder, _last(value, dim), descending)
    return _back(values, dim), None if indices is None else _back(indices, dim)


@lowers(aten.sort.default)
def lower_sort(
    builder: Builder, self: Value, dim: int = -1, descending: bool = False
) -> tuple[Value, Value | None]:
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
        numbers = apply("sub", Index(size), count)
        if ignore_nan:
            last = apply("maximum", apply("sub", numbers, const(1, i64)), const(0, i64))
            at = apply("floor_divide", last, const(2, i64))
        else:
            any_nan = apply("gt", count, const(0, i64))
            at = apply("where", any_nan, numbers, at)
    sizes = tuple(s for k, s in enumerate(value.sizes) if k != dim)
    shape = tuple(ONE if k == dim else s for k, s in enumerate(value.sizes))
    results: list[Value | None] = []
    for found in (values, indices):
        if found is None:
            results.append(None)
            continue
        where: list[IndexLike] = list(positions(sizes))
        where.insert(dim, at)
        picked = builder.pointwise(found.at(where), sizes, name="median")
        results.append(reshape(picked, shape) if keepdim else picked)
    first = results[0]
    assert first is not None
    return first, results[1]


@lowers(aten.median.dim)
def lower_median(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value | None]:
    return _median(builder, self, dim, keepdim, ignore_nan=False)


@lowers(aten.nanmedian.dim)
def lower_nanmedian(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value | None]:
    return _median(builder, self, dim, keepdim, ignore_nan=True)


@lowers(aten.median.default)
def lower_median_all(builder: Builder, self: Value) -> Value:
    return _median_all(builder, self, ignore_nan=False)


@lowers(aten.nanmedian.default)
def lower_nanmedian_all(builder: Builder, self: Value) -> Value:
    return _median_all(builder, self, ignore_nan=True)


def _median_all(builder: Builder, value: Value, ignore_nan: bool) -> Value:
    if value.is_empty:
        raise NotLowered("the median of nothing")
    flat = reshape(value, [value.numel])
    builder.used = frozenset({0})
    return _median(builder, flat, 0, False, ignore_nan)[0]


@lowers(aten.searchsorted.Tensor)
def lower_searchsorted(
    builder: Builder,
    sorted_sequence: Value,
    self: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    """How many elements of the sorted rows come before each value."""
    if sorter is not None or sorted_sequence.is_empty or self.is_empty:
        raise NotLowered("searchsorted with a sorter or nothing to search")
    after = right or side == "right"
    return _count_before(builder, sorted_sequence, self, after)


@lowers(aten.bucketize.Tensor)
def lower_bucketize(
    builder: Builder,
    self: Value,
    boundaries: Value,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Value:
    if boundaries.is_empty or self.is_empty:
        raise NotLowered("bucketize of nothing")
    return _count_before(builder, boundaries, self, right)


def _count_before(builder: Builder, edges: Value, value: Value, after: bool) -> Value:
    count = edges.sizes[-1]
    if not (count.is_constant and count.constant <= LONGEST_ROW):
        raise NotLowered(f"searching rows of {count} elements: at most {LONGEST_ROW} here")
    (r,) = positions((count,), "r")
    index = positions(value.sizes)
    rows = index[:-1] if edges.rank > 1 else ()
    common = promote(value.dtype, edges.dtype)
    assert common is not None
    dtype = compute_dtype(common)
    edge, mine = cast(edges.at([*rows, r]), dtype), cast(value.body, dtype)
    # NaN sorts last: an edge is before NaN unless it is NaN and ties count as after.
    found = (
        apply("bitwise_not", _before(mine, edge, False)) if after else _before(edge, mine, False)
    )
    total = builder.reduce("sum", cast(found, dtypes.int32), value.sizes, (count,), name="count")
    return builder.pointwise(cast(total.body, builder.out.dtype), value.sizes)
