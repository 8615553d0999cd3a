"""Scatters that combine: by accumulation where that is a sum, else as reductions over the sources.

Source: ATen ``scatter_reduce``, ``scatter.reduce``, ``index_reduce``, ``as_strided_scatter``,
``put``, ``max_unpool``, ``replication_pad_backward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, where
from ..symbolic.sizes import (
    Expr,
    IntLike,
    as_expr,
    delinearize,
    linearize,
    product,
)
from .builder import Builder
from .index_checks import data_index
from .pointwise import larger, plus, smaller, times
from .promotion import Operand, compute_dtype
from .registry import NotLowered, lowers
from .scattering import Updates, reduced, scatter, updates_along, updates_of_slices
from .value import IndexLike, Value, positions, reshape, zeros
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


def _reduced(
    builder: Builder, updates: Updates, reduce: str, include_self: bool, sizes: Sequence[Expr]
) -> Value:
    """Each element reduced with the updates that name it, in ``sizes``.

    ``reduce`` is a key of `_KINDS`. Raises NotLowered: for a mean of bools.
    """
    value = updates.initial
    dtype = compute_dtype(value.dtype)
    if dtype is dtypes.bool_:
        if reduce == "mean":
            raise NotLowered("a mean of bools")
        dtype = dtypes.int32  # sums of 0 and 1, and which of them is the larger
    old, kind = cast(value.body, dtype), _KINDS[reduce]
    wide = replace(updates, initial=value.cast(dtype), body=cast(updates.body, dtype))
    total, hits = reduced(builder, wide, kind, is_counted=reduce == "mean")
    result = _COMBINE[kind](old, total) if include_self else total
    if reduce == "mean":
        count = cast(apply("maximum", hits + int(include_self), 1), dtype)
        result = apply("div" if dtype.is_float else "floor_divide", result, count)
    body = cast(where(hits > 0, result, old), value.dtype)
    return reshape(builder.pointwise(body, value.sizes), sizes)


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
    updates = updates_along(builder, self, dim, index, src)
    return _reduced(builder, updates, reduce, include_self, self.sizes)


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
    updates = updates_of_slices(builder, self, dim, index, source)
    return _reduced(builder, updates, reduce, include_self, self.sizes)


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
    return builder.scatter(self, src.sizes, index, cast(src.body, self.dtype))


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
