"""Scatters that combine: by accumulation where that is a sum, else as reductions over the sources.

Source: ATen ``scatter_reduce``, ``scatter.reduce``, ``index_reduce``, ``as_strided_scatter``,
``put``, ``max_unpool``, ``replication_pad_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Index, Scalar, apply, cast, neutral, where
from ..symbolic.sizes import (
    ONE,
    Expr,
    IntLike,
    as_expr,
    delinearize,
    linearize,
    product,
    upper_bound,
)
from .builder import Builder, as_value, masked
from .index_checks import data_index
from .pointwise import larger, plus, smaller, times
from .promotion import Operand, compute_dtype
from .registry import NotLowered, lowers
from .scans import inclusive_scan
from .scattering import scatter
from .sorting import binary_search, sort_along
from .value import IndexLike, Value, all_of, in_range, positions, reshape, zeros
from .views import require_whole_storage

aten = torch.ops.aten

_KINDS = {
    "sum": "sum",
    "add": "sum",
    "mean": "sum",
    "prod": "prod",
    "multiply": "prod",
    "amax": "maximum",
    "amin": "minimum",
}
_COMBINE = {"sum": plus, "prod": times, "maximum": larger, "minimum": smaller}


# n² comparisons a row: at 4096 that is 16 M, about the work of a 256³ matrix product.
_FEW = 4096


def are_few(count: Expr) -> bool:
    """Whether each result is compared with all of so many indices, rather than these sorted."""
    most = upper_bound(count)
    return most is not None and most <= _FEW


def scatter_reduce(
    builder: Builder,
    value: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    include_self: bool,
) -> Value:
    """Each element of ``value`` reduced with the elements of ``source`` whose ``index`` names it.

    ``reduce`` is a key of `_KINDS`. Raises NotLowered: for a mean of bools.
    """
    kind = _KINDS[reduce]
    count = index.sizes[dim]
    dtype = compute_dtype(value.dtype)
    if dtype is dtypes.bool_:
        if reduce == "mean":
            raise NotLowered("a mean of bools")
        dtype = dtypes.int32  # sums of 0 and 1, and which of them is the larger
    if are_few(count):
        total, hits = _compared(builder, value, dim, index, source, kind, dtype)
    else:
        total, hits = _of_sorted(builder, value, dim, index, source, kind, dtype)
    return _combined(builder, value, total, hits, reduce, include_self)


def _compared(
    builder: Builder, value: Value, dim: int, index: Value, source: Value, kind: str, dtype: DType
) -> tuple[Scalar, Scalar]:
    """(the reduction of the sources of each element, how many they are), comparing each index."""
    count = index.sizes[dim]
    here = positions(value.sizes)
    (r,) = positions((count,), "r")
    at = [*here[:dim], r, *here[dim + 1 :]]
    inside = _inside(at, index, dim)
    named = data_index(builder, index.at(at), value.sizes[dim], dim)
    hits = apply("eq", named, Index(here[dim]))
    identity = neutral(kind, dtype)
    body = masked(inside, where(hits, cast(source.at(at), dtype), identity), identity)
    total = builder.reduce(kind, body, value.sizes, (count,), name="reduced").body
    hit_count = masked(inside, cast(hits, dtypes.int32), 0)
    return total, builder.reduce("sum", hit_count, value.sizes, (count,), name="hits").body


def _inside(at: Sequence[Expr], index: Value, dim: int) -> Scalar:
    """Whether a position is one of ``index``, apart from ``dim``."""
    others = (in_range(at[k], index.sizes[k]) for k in range(index.rank) if k != dim)
    return all_of([condition for conditions in others for condition in conditions])


def _of_sorted(
    builder: Builder, value: Value, dim: int, index: Value, source: Value, kind: str, dtype: DType
) -> tuple[Scalar, Scalar]:
    """`_compared` for any number of indices: sorted, so that those of an element are neighbours.

    The sources in that order are scanned, and each element finds its last one by a binary search.
    """
    count = index.sizes[dim]
    named = data_index(builder, index.body, value.sizes[dim], dim)
    entries = builder.pointwise(named, index.sizes, name="named")
    keys, places = sort_along(builder, entries, dim)
    assert places is not None
    at = positions(index.sizes)
    ordered = cast(source.at([*at[:dim], places.body, *at[dim + 1 :]]), dtype)
    sources = builder.pointwise(ordered, index.sizes, name="ordered")
    scanned = inclusive_scan(builder, kind, sources, dim, keys=keys)
    here = positions(value.sizes)
    own = Index(here[dim])

    def row(found: Value, position: Scalar) -> Scalar:
        return found.at([*here[:dim], position, *here[dim + 1 :]])

    inside = _inside(here, index, dim)
    ends = masked(inside, binary_search(lambda p: row(keys, p) <= own, count), 0)
    end = builder.pointwise(ends, value.sizes, name="end")
    starts = masked(inside, binary_search(lambda p: row(keys, p) < own, count), 0)
    start = builder.pointwise(starts, value.sizes, name="start")
    last = apply("maximum", end.body - 1, 0)
    total = masked(inside, row(scanned, last), neutral(kind, dtype))
    return total, cast(end.body - start.body, dtypes.int32)


def _combined(
    builder: Builder, value: Value, total: Scalar, hits: Scalar, reduce: str, include_self: bool
) -> Value:
    """The reduction together with the initial contents."""
    dtype = total.dtype
    old = cast(value.body, dtype)
    touched = hits > 0
    result = _COMBINE[_KINDS[reduce]](old, total) if include_self else total
    if reduce == "mean":
        count = cast(apply("maximum", hits + int(include_self), 1), dtype)
        result = apply("div" if dtype.is_float else "floor_divide", result, count)
    return builder.pointwise(cast(where(touched, result, old), value.dtype), value.sizes)


def _along(
    builder: Builder,
    self: Value,
    dim: int,
    index: Value,
    src: Operand,
    reduce: str,
    include_self: bool,
) -> Value:
    if self.is_empty or index.is_empty:
        return self
    sizes = self.sizes
    if not self.rank:
        self = reshape(self, [ONE])
    if not index.rank:
        index = reshape(index, [ONE])
    source = src if isinstance(src, Value) and src.rank else as_value(src, index.sizes, self.dtype)
    result = scatter_reduce(builder, self, dim % self.rank, index, source, reduce, include_self)
    return reshape(result, sizes)


@lowers(aten.scatter_reduce.two)
def lower_scatter_reduce(
    builder: Builder,
    self: Value,
    dim: int,
    index: Value,
    src: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """Each element of ``self`` reduced with the elements of ``src`` that ``index`` sends to it.

    ``index`` addresses ``self`` along ``dim`` as in scatter. Without ``include_self`` only elements
    that receive nothing keep their value. Raises NotLowered: for a mean of bools.
    """
    return _along(builder, self, dim, index, src, reduce, include_self)


@lowers(aten.scatter.reduce, aten.scatter.value_reduce)
def lower_scatter_with_reduce(
    builder: Builder, self: Value, dim: int, index: Value, src: Operand, *, reduce: str
) -> Value:
    """``self`` with ``src`` (a tensor or a number) added or multiplied along ``dim`` at ``index``.

    ``reduce`` is "add" or "multiply".
    """
    return _along(builder, self, dim, index, src, reduce, include_self=True)


@lowers(aten.index_reduce.default)
def lower_index_reduce(
    builder: Builder,
    self: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """`lower_scatter_reduce` of whole slices: the index is a vector along ``dim``.

    Raises NotLowered: for a mean of bools.
    """
    if self.is_empty or index.is_empty:
        return self
    if not self.rank:
        single = as_value(source, (), self.dtype) if not source.rank else reshape(source, ())
        return _along(builder, self, 0, index, single, reduce, include_self)
    dim %= self.rank
    if not source.rank:
        source = reshape(source, [ONE])
    vector = index if index.rank else reshape(index, [ONE])
    along = positions(source.sizes)[dim]
    spread = Value(index.dtype, source.sizes, vector.at([along]))
    return _along(builder, self, dim, spread, source, reduce, include_self)


@lowers(aten.as_strided_scatter.default)
def lower_as_strided_scatter(
    builder: Builder,
    self: Value,
    src: Value,
    size: Sequence[IntLike],
    stride: Sequence[IntLike],
    storage_offset: IntLike | None = None,
) -> Value:
    """``self``, taken as contiguous memory, with a strided part of it replaced by ``src``.

    Raises UnsupportedOp: unless ``self`` is contiguous and its whole storage.
    """
    require_whole_storage(builder)
    if src.is_empty:
        return self
    flat = linearize(positions(src.sizes), [as_expr(s) for s in stride])
    flat = flat + (0 if storage_offset is None else storage_offset)
    index: list[IndexLike] = list(delinearize(flat, self.sizes))
    return builder.scatter(self, src.sizes, index, cast(src.body, self.dtype), accumulate=False)


@lowers(aten.put.default)
def lower_put(
    builder: Builder, self: Value, index: Value, source: Value, accumulate: bool = False
) -> Value:
    """``self`` with elements at row-major positions set, or (``accumulate``) increased.

    A negative position counts from the end; one out of range is reported. Raises NotLowered: where
    `scatter` does.
    """
    if self.is_empty or index.is_empty:
        return self
    flat = reshape(self, [self.numel])
    position = data_index(builder, index.body, self.numel, None, wrap=True)
    body = cast(reshape(source, index.sizes).body, self.dtype)
    result = scatter(builder, flat, index.sizes, [position], body, accumulate)
    return reshape(result, self.sizes)


@lowers(aten.max_unpool2d.default, aten.max_unpool3d.default)
def lower_max_unpool(
    builder: Builder,
    self: Value,
    indices: Value,
    output_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (),
) -> Value:
    """Zeros of [*, *output_size], with each element at the row-major position in ``indices``.

    Positions are those in the space of the element's own channel; one out of range is reported.
    """
    sizes, rank = builder.out.sizes, len(output_size)
    area = product(sizes[-rank:])
    initial = zeros((*sizes[:-rank], area), self.dtype)
    if initial.is_empty or self.is_empty:
        return zeros(sizes, self.dtype)
    at: list[IndexLike] = list(positions(self.sizes)[:-rank])
    at.append(data_index(builder, indices.body, area, None))
    return reshape(scatter(builder, initial, self.sizes, at, self.body, accumulate=False), sizes)


def _register_replication_backward(rank: int) -> None:
    @lowers(getattr(aten, f"replication_pad{rank}d_backward").default)
    def lower(
        builder: Builder, grad_output: Value, self: Value, padding: Sequence[IntLike]
    ) -> Value:
        """Every gradient element added to the element that it repeats."""
        index: list[IndexLike] = list(positions(grad_output.sizes))
        for k in range(rank):
            dim = self.rank - 1 - k
            entry = index[dim]
            assert isinstance(entry, Expr)
            position: Scalar = Index(entry - padding[2 * k])
            position = apply("maximum", position, 0)
            index[dim] = apply("minimum", position, Index(self.sizes[dim] - 1))
        initial = zeros(self.sizes, self.dtype)
        return scatter(
            builder, initial, grad_output.sizes, index, grad_output.body, accumulate=True
        )


for _rank in (1, 2, 3):
    _register_replication_backward(_rank)
