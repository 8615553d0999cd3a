"""Views: substitutions of index symbols, without nodes.

Values have no layout, so copies that only change memory are views too. Sizes are taken from the
fake result, which has resolved -1 and negative dimensions. Source: ATen schemas of the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dtypes import DType
from ..errors import UnsupportedOp
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    IntLike,
    as_expr,
    delinearize,
    from_start,
    linearize,
    maximum,
)
from ..torch_private import statically_known_true
from .builder import Builder, as_value
from .float_to_integer import to_dtype
from .promotion import Operand
from .registry import lowers
from .value import (
    IndexLike,
    Value,
    expand,
    has_no_elements,
    permute,
    positions,
    reshape,
    select,
    slice_dim,
    view,
)

aten = torch.ops.aten


@lowers(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias_copy.default,
    aten.detach_copy.default,
    aten.positive.default,
)
def lower_same(builder: Builder, self: Value, *strides: Any, **layout: Any) -> Value:
    """``self``: changes of memory (clone, contiguous) are none of a value, which has no layout."""
    return self


@lowers(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view_copy.default,
    aten.unsqueeze_copy.default,
    aten.squeeze_copy.default,
    aten.flatten.using_ints,
)
def lower_reshape(builder: Builder, self: Value, *sizes: Any) -> Value:
    """The same elements in row-major order, in the sizes of the fake result."""
    return reshape(self, builder.out.sizes)


@lowers(aten._neg_view.default, aten._neg_view_copy.default)
def lower_neg_view(builder: Builder, self: Value) -> Value:
    """-x: in a graph, a lazy negation is one."""
    return Value(self.dtype, self.sizes, -self.body)


@lowers(aten.expand.default, aten.expand_copy.default)
def lower_expand(builder: Builder, self: Value, size: Any, *, implicit: bool = False) -> Value:
    """Broadcast to the sizes of the fake result, aligned at the last dimension."""
    return expand(self, builder.out.sizes)


@lowers(aten.permute.default, aten.permute_copy.default)
def lower_permute(builder: Builder, self: Value, dims: Sequence[int]) -> Value:
    """Dimension k of the result is dimension ``dims[k]`` of ``self``."""
    return permute(self, dims) if self.rank else self


@lowers(aten.transpose.int, aten.transpose_copy.int)
def lower_transpose(builder: Builder, self: Value, dim0: int, dim1: int) -> Value:
    """Two dimensions exchanged; a tensor without dimensions is returned as it is."""
    if not self.rank:
        return self
    dims = list(range(self.rank))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(self, dims)


@lowers(aten.t.default)
def lower_t(builder: Builder, self: Value) -> Value:
    """The transpose of a matrix; a vector is returned as it is."""
    return permute(self, list(range(self.rank))[::-1])


def slice_start(builder: Builder, place: int, start: IntLike | None, size: Expr) -> Expr:
    """The first index of a slice, wrapped and clamped as Python does.

    ``place``: of the operator's argument. One after the end makes an empty slice: it stays.
    """
    if start is None:
        return ZERO
    first = as_expr(start)
    if first.is_constant:
        if first.constant < 0:
            first = first + size
        if first.is_constant and size.is_constant:
            return as_expr(min(max(first.constant, 0), size.constant))
        return first
    position = wrapped(builder, place, first, size)
    return position if position is first else maximum(position, ZERO)


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def lower_slice(
    builder: Builder,
    self: Value,
    dim: int = 0,
    start: IntLike | None = None,
    end: IntLike | None = None,
    step: int = 1,
) -> Value:
    """``self[start:end:step]`` along ``dim``.

    The number of elements is that of the fake result, so ``end`` is not looked at.
    """
    dim %= self.rank
    first = slice_start(builder, 2, start, self.sizes[dim])
    return slice_dim(self, dim, first, builder.out.sizes[dim], int(step))


@lowers(aten.narrow_copy.default)
def lower_narrow(builder: Builder, self: Value, dim: int, start: IntLike, length: IntLike) -> Value:
    """``length`` elements of ``dim`` from ``start``, where a negative one counts from the end."""
    dim %= self.rank
    return slice_dim(self, dim, slice_start(builder, 2, start, self.sizes[dim]), as_expr(length))


@lowers(aten.select.int, aten.select_copy.int)
def lower_select(builder: Builder, self: Value, dim: int, index: IntLike) -> Value:
    """The slice at ``index`` of ``dim``, which disappears; it may be negative."""
    return select(self, dim, wrapped(builder, 2, index, self.sizes[dim % self.rank]))


def wrapped(builder: Builder, place: int, index: IntLike, size: Expr) -> Expr:
    """A Python index, of which a negative one counts from the end.

    ``place``: of the operator's argument. What tracing knows of it is not in the expression.
    """
    position = as_expr(index)
    if position.is_constant:
        return position + size if position.constant < 0 else position
    return position if _is_known_nonnegative(builder, place) else from_start(position, size)


def _is_known_nonnegative(builder: Builder, place: int) -> bool:
    arguments, _ = builder.traced
    value = arguments[place] if place < len(arguments) else None
    return isinstance(value, torch.SymInt) and statically_known_true(value >= 0)


@lowers(aten.split_with_sizes.default, aten.split_with_sizes_copy.default)
def lower_split_with_sizes(
    builder: Builder, self: Value, split_sizes: Sequence[IntLike], dim: int = 0
) -> tuple[Value, ...]:
    """Consecutive parts along ``dim`` with these sizes."""
    parts, start = [], ZERO
    for size in split_sizes:
        parts.append(slice_dim(self, dim, start, as_expr(size)))
        start = start + size
    return tuple(parts)


@lowers(aten.split.Tensor, aten.split_copy.Tensor)
def lower_split(
    builder: Builder, self: Value, split_size: IntLike, dim: int = 0
) -> tuple[Value, ...]:
    """Consecutive parts along ``dim``, as long as those of the fake results."""
    sizes = [result.sizes[dim % self.rank] for result in builder.results if result]
    return lower_split_with_sizes(builder, self, sizes, dim)


@lowers(aten.unbind.int, aten.unbind_copy.int)
def lower_unbind(builder: Builder, self: Value, dim: int = 0) -> tuple[Value, ...]:
    """The slices along ``dim``, one result for each, without that dimension."""
    return tuple(select(self, dim, as_expr(k)) for k in range(len(builder.results)))


@lowers(aten.flip.default)
def lower_flip(builder: Builder, self: Value, dims: Sequence[int]) -> Value:
    """The elements of each of ``dims`` in reverse order."""
    index: list[IndexLike] = list(positions(self.sizes))
    for dim in dims:
        k = dim % max(self.rank, 1)
        entry = index[k]
        assert isinstance(entry, Expr)
        index[k] = ZERO if self.sizes[k] is ONE else self.sizes[k] - 1 - entry
    return view(self, self.sizes, index)


@lowers(aten.roll.default)
def lower_roll(
    builder: Builder, self: Value, shifts: Sequence[IntLike], dims: Sequence[int] = ()
) -> Value:
    """Element k of a dimension moves to (k + shift) modulo its size.

    Without ``dims``, the tensor is shifted as one row-major vector.
    """
    if not dims:
        flat = reshape(self, [self.numel])
        return reshape(lower_roll(builder, flat, shifts, [0]), self.sizes)
    index = list(positions(self.sizes))
    for shift, dim in zip(shifts, dims, strict=True):
        k = dim % self.rank
        if self.sizes[k] not in (ONE, ZERO):
            index[k] = (index[k] + (as_expr(0) - shift) % self.sizes[k]) % self.sizes[k]
    return view(self, self.sizes, index)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def lower_diagonal(
    builder: Builder, self: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """The diagonal of ``dim1`` and ``dim2``, as the last dimension of the result.

    ``offset`` > 0 is above the main diagonal, < 0 below.
    """
    dim1, dim2 = dim1 % self.rank, dim2 % self.rank
    sizes = builder.out.sizes
    *rest, along = positions(sizes) if sizes else (ZERO,)
    index = list(rest)
    entries = {dim1: along + max(-offset, 0), dim2: along + max(offset, 0)}
    for dim in sorted(entries):
        index.insert(dim, entries[dim])
    return view(self, sizes, index)


@lowers(aten.repeat.default)
def lower_repeat(builder: Builder, self: Value, repeats: Sequence[IntLike]) -> Value:
    """``self`` repeated that often along each dimension.

    There may be more ``repeats`` than dimensions: ``self`` gets leading dimensions of size 1.
    """
    sizes = builder.out.sizes
    new = positions(sizes)
    skip = len(sizes) - self.rank
    index = [
        new[skip + k] if sizes[skip + k] is size else new[skip + k] % size if size else ZERO
        for k, size in enumerate(self.sizes)
    ]
    return view(self, sizes, index)


@lowers(aten.unfold.default, aten.unfold_copy.default)
def lower_unfold(builder: Builder, self: Value, dimension: int, size: int, step: int) -> Value:
    """Windows of ``size`` elements, ``step`` apart, of a dimension.

    The result has as many windows in that dimension, and their elements in a new last one.
    """
    if not self.rank:
        return reshape(self, builder.out.sizes)
    *rest, inside = positions(builder.out.sizes)
    dim = dimension % self.rank
    index = list(rest)
    index[dim] = index[dim] * step + inside
    return view(self, builder.out.sizes, index)


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def lower_as_strided(
    builder: Builder,
    self: Value,
    size: Sequence[IntLike],
    stride: Sequence[IntLike],
    storage_offset: IntLike | None = None,
) -> Value:
    """``self`` read as memory, with the given sizes, strides and offset (in elements).

    Raises UnsupportedOp: unless ``self`` is contiguous and its whole storage, as a value has no
    other memory.
    """
    require_whole_storage(builder)
    sizes = builder.out.sizes
    flat = linearize(positions(sizes), [as_expr(s) for s in stride])
    flat = flat + (0 if storage_offset is None else storage_offset)
    if has_no_elements(sizes):
        return view(self, sizes, [ZERO] * self.rank)
    return Value(self.dtype, sizes, self.at(delinearize(flat, self.sizes)))


def require_whole_storage(builder: Builder) -> None:
    """Raises UnsupportedOp unless the first argument is contiguous and covers its storage."""
    tensor = builder.arguments[0]
    whole = (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
    if not whole:
        raise UnsupportedOp(
            builder.origin.op,
            "its tensor is a view of larger memory, which a compiled graph does not have",
            "call .contiguous() before it",
            builder.origin.source,
        )


@lowers(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def lower_to_copy(builder: Builder, self: Operand, *dtype: torch.dtype, **options: Any) -> Value:
    """``self`` in the result's dtype; a change of device or layout alone does nothing here.

    Promotion under ``vmap`` converts Python numbers, too, where it should convert tensors of one.
    """
    if not isinstance(self, Value):
        return as_value(self, builder.out.sizes, builder.out.dtype)
    return _to_dtype(builder, self, builder.out.dtype)


@lowers(aten.copy.default)
def lower_copy(builder: Builder, self: Value, src: Operand, non_blocking: bool = False) -> Value:
    """``src``, a tensor or a number, with the sizes and dtype of ``self``."""
    if not isinstance(src, Value):
        return as_value(src, self.sizes, self.dtype)
    return _to_dtype(builder, expand(src, self.sizes), self.dtype)


def _to_dtype(builder: Builder, value: Value, dtype: DType) -> Value:
    if value.dtype is dtype:
        return value
    return builder.pointwise(to_dtype(value.body, dtype), value.sizes)


if hasattr(torch.ops.prims, "copy_strided"):  # from torch 2.13 on
    lowers(torch.ops.prims.copy_strided.default)(lower_same)


@lowers(torch.ops.prims.broadcast_in_dim.default)
def lower_broadcast_in_dim(
    builder: Builder, a: Value, shape: Sequence[IntLike], broadcast_dimensions: Sequence[int]
) -> Value:
    """``shape``, where dimension k of ``a`` is dimension ``broadcast_dimensions[k]``."""
    sizes = builder.out.sizes
    new = positions(sizes)
    index = [
        ZERO if size is ONE else new[dim]
        for size, dim in zip(a.sizes, broadcast_dimensions, strict=True)
    ]
    return view(a, sizes, index)
