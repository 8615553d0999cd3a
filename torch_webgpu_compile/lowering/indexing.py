"""Gathers and scatters by index tensors. Source: ATen schemas of the same names.

Indices are checked where the kernel runs (`index_checks`); negative ones count from the end for
``index`` and ``take`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import Index, apply, cast, where
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike
from .builder import Builder, as_value, masked
from .index_checks import data_index, data_position
from .pointwise import plus, scaled
from .promotion import Operand
from .registry import NotLowered, lowers
from .scans import inclusive_scan
from .scattering import scatter, updated, updates_along, updates_of_slices
from .value import (
    IndexLike,
    Value,
    broadcast_index,
    broadcast_sizes,
    expand,
    has_no_elements,
    positions,
    reshape,
    zeros,
)

aten = torch.ops.aten


def gathered(
    builder: Builder, value: Value, index: Sequence[IndexLike], sizes: Sequence[Expr]
) -> Value:
    """value[index] as a node, or as a view when no index comes from data."""
    body = value.at(index)
    if all(isinstance(entry, (Expr, Index)) for entry in index):
        return Value(value.dtype, tuple(sizes), body)
    return builder.pointwise(body, sizes)


def _of_one(builder: Builder, value: Value, index: Value) -> Value:
    """A number for each index, which can only be 0: what depends on it is whether it is."""
    is_there = data_index(builder, index.body, ONE, 0) >= 0
    return builder.pointwise(masked(is_there, value.body, 0), index.sizes)


@lowers(aten.embedding.default)
def lower_embedding(
    builder: Builder,
    weight: Value,
    indices: Value,
    padding_idx: IntLike = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """``weight[indices, :]``: sizes [*indices, columns]. An index out of range is reported.

    ``padding_idx``, ``scale_grad_by_freq`` and ``sparse`` only matter to the gradient.
    """
    out = builder.out
    *rows, column = positions(out.sizes)
    if weight.is_empty or indices.is_empty:
        return zeros(out.sizes, out.dtype)
    row = data_index(builder, indices.at(rows), weight.sizes[0], 0)
    return gathered(builder, weight, [row, column], out.sizes)


@lowers(aten.index_select.default)
def lower_index_select(builder: Builder, self: Value, dim: int, index: Value) -> Value:
    """The slices of ``dim`` at the indices of a vector; an index out of range is reported.

    A tensor without dimensions has one element, which every index must name as 0.
    """
    out = builder.out
    if self.is_empty or index.is_empty:
        return zeros(out.sizes, out.dtype)
    if not self.rank:
        return _of_one(builder, self, reshape(index, ()))
    dim %= self.rank
    at: list[IndexLike] = list(positions(out.sizes))
    entry = at[dim]
    at[dim] = data_index(builder, index.at([entry] if index.rank else []), self.sizes[dim], dim)
    return gathered(builder, self, at, out.sizes)


@lowers(aten.take.default)
def lower_take(builder: Builder, self: Value, index: Value) -> Value:
    """Elements at row-major positions, in the sizes of ``index``.

    A negative position counts from the end; one out of range is reported.
    """
    if index.is_empty:
        return zeros(index.sizes, self.dtype)
    flat = reshape(self, [self.numel])
    position = data_index(builder, index.body, self.numel, None, wrap=True)
    return gathered(builder, flat, [position], index.sizes)


@lowers(aten.gather.default)
def lower_gather(
    builder: Builder, self: Value, dim: int, index: Value, *, sparse_grad: bool = False
) -> Value:
    """``self`` at its own position, but along ``dim`` at ``index``; sizes are those of ``index``.

    An index out of range, also a negative one, is reported.
    """
    out = builder.out
    if index.is_empty or self.is_empty:
        return zeros(out.sizes, out.dtype)
    if not self.rank:
        return _of_one(builder, self, index)
    dim %= self.rank
    if not index.rank:
        position = data_index(builder, index.body, self.sizes[0], 0)
        return builder.pointwise(self.at([position]), ())
    at: list[IndexLike] = list(positions(out.sizes))
    at[dim] = data_index(builder, index.body, self.sizes[dim], dim)
    return gathered(builder, self, at, out.sizes)


class Indexed:
    """The elements of a tensor that ``index`` and ``index_put`` address.

    ``sizes`` are the sizes of the result; ``index`` is the element of the tensor for each position.
    ``checked``: whether the indices may be out of range.
    """

    def __init__(
        self, builder: Builder, value: Value, indices: Sequence[Value | None], checked: bool
    ) -> None:
        tensors = {k: t for k, t in enumerate(indices) if t is not None}
        if any(t.dtype.kind is Kind.BOOL or t.dtype is dtypes.uint8 for t in tensors.values()):
            raise NotLowered("a mask as index selects a number of elements that depends on data")
        shared = broadcast_sizes([t.sizes for t in tensors.values()])
        dims = sorted(tensors)
        adjacent = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
        first = dims[0] if dims and adjacent else 0
        rest = [k for k in range(value.rank) if k not in tensors]
        before = [k for k in rest if k < first]
        after = [k for k in rest if k >= first]
        rest_sizes = [value.sizes[k] for k in before]
        self.sizes = (*rest_sizes, *shared, *(value.sizes[k] for k in after))
        self.is_empty = has_no_elements(self.sizes) or value.is_empty
        self.index: list[IndexLike] = []
        if self.is_empty:
            return
        symbols = positions(self.sizes)
        at_shared = symbols[len(before) : len(before) + len(shared)]
        plain = dict(zip(before, symbols, strict=False))
        plain.update(zip(after, symbols[len(before) + len(shared) :], strict=True))
        for k in range(value.rank):
            if k in tensors:
                tensor = tensors[k]
                element = tensor.at(broadcast_index(tensor, at_shared))
                size = value.sizes[k]
                self.index.append(
                    data_index(builder, element, size, k, wrap=True)
                    if checked
                    else data_position(element, size)
                )
            else:
                self.index.append(plain[k])


def lower_index(
    builder: Builder, self: Value, indices: Sequence[Value | None], *, checked: bool
) -> Value:
    """``self[indices]`` with integer tensors, which broadcast; None keeps a dimension.

    Negative indices count from the end; one out of range is reported, if they are ``checked``.
    Raises NotLowered: for masks (bool or uint8), which select a number of elements that depends on
    data.
    """
    found = Indexed(builder, self, indices, checked)
    if found.is_empty:
        return zeros(found.sizes, self.dtype)
    return gathered(builder, self, found.index, found.sizes)


lowers(aten.index.Tensor)(partial(lower_index, checked=True))
lowers(aten._unsafe_index.Tensor)(partial(lower_index, checked=False))


@lowers(aten._unsafe_masked_index.default)
def lower_masked_index(
    builder: Builder, self: Value, mask: Value, indices: Sequence[Value | None], fill: Operand
) -> Value:
    """``self[indices]`` where the mask holds, else ``fill``; indices are not checked.

    Raises NotLowered: for bool or uint8 indices.
    """
    found = Indexed(builder, self, indices, checked=False)
    if found.is_empty:
        return as_value(fill, builder.out.sizes, self.dtype)
    condition = expand(mask, found.sizes).body
    other = as_value(fill, found.sizes, self.dtype).body
    return builder.pointwise(masked(condition, self.at(found.index), other), found.sizes)


def lower_index_put(
    builder: Builder,
    self: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    *,
    checked: bool,
) -> Value:
    """``self`` with ``self[indices]`` set to, or (``accumulate``) increased by, the values.

    A bool mask as the only index takes the values in row-major order; an index out of range is
    reported, if they are ``checked``. Raises NotLowered: for uint8 masks and for masks beside other
    indices, and where `scatter` does.
    """
    masks = [t for t in indices if t is not None]
    if len(masks) == 1 and masks[0].dtype is dtypes.bool_:
        return _masked_put(builder, self, indices, values, accumulate)
    found = Indexed(builder, self, indices, checked)
    if found.is_empty:
        return self
    body = cast(expand(values, found.sizes).body, self.dtype)
    return scatter(builder, self, found.sizes, found.index, body, accumulate)


lowers(aten.index_put.default)(partial(lower_index_put, checked=True))
lowers(aten._unsafe_index_put.default)(partial(lower_index_put, checked=False))


def _masked_put(
    builder: Builder, value: Value, indices: Sequence[Value | None], new: Value, accumulate: bool
) -> Value:
    """New values, in order, at the elements of a mask, which covers consecutive dimensions."""
    if value.is_empty or new.is_empty:
        return value
    first = next(k for k, t in enumerate(indices) if t is not None)
    mask = indices[first]
    assert mask is not None
    index = list(positions(value.sizes))
    place: list[IndexLike] = list(index[first : first + mask.rank])
    condition = mask.at(place)
    after = index[first + mask.rank :]
    number: IndexLike = ZERO
    dim = new.rank - len(after) - 1
    if dim >= 0 and new.sizes[dim] is not ONE:
        before = _number_among_chosen(builder, mask).at(place)
        number = data_index(builder, before, new.sizes[dim], dim)  # more are chosen than are given
    at = [*index[:first], number, *after]
    element = cast(new.at(broadcast_index(new, at)), value.dtype)
    if accumulate:
        element = plus(value.body, element)
    return builder.pointwise(masked(condition, element, value.body), value.sizes)


def _number_among_chosen(builder: Builder, mask: Value) -> Value:
    """How many elements of a mask are set before each one, in row-major order."""
    flat = reshape(mask, [mask.numel]).cast(dtypes.int64)
    before = reshape(inclusive_scan(builder, "sum", flat, 0), mask.sizes).body - 1
    return Value(dtypes.int64, mask.sizes, before)


@lowers(aten.masked_scatter.default)
def lower_masked_scatter(builder: Builder, self: Value, mask: Value, source: Value) -> Value:
    """``self``, where masked replaced by the next element of ``source`` in row-major order.

    The mask broadcasts to the result. An element of ``source`` that is missing is reported as an
    index out of range.
    """
    sizes = builder.out.sizes
    if self.is_empty or source.is_empty:
        return self
    chosen = expand(mask, sizes)
    position = _number_among_chosen(builder, chosen).body
    flat_source = reshape(source, [source.numel])
    # Where nothing is masked the position means nothing; what is loaded there is not looked at.
    taken = flat_source.at([data_index(builder, position, source.numel, None)])
    return builder.pointwise(masked(chosen.body, taken, expand(self, sizes).body), sizes)


def _scatter_along(
    builder: Builder, self: Value, dim: int, index: Value, src: Operand, accumulate: bool
) -> Value:
    if index.is_empty or self.is_empty:
        return self
    updates = updates_along(builder, self, dim, index, src)
    return reshape(updated(builder, updates, accumulate), self.sizes)


@lowers(aten.scatter.src, aten.scatter.value)
def lower_scatter(builder: Builder, self: Value, dim: int, index: Value, src: Operand) -> Value:
    """``self`` with ``src`` (a tensor or a number) set along ``dim`` at the positions in ``index``.

    ``index`` has the rank of ``self`` and addresses it as in `lower_gather`. Which of several
    updates of one element stays is open, unless deterministic results are asked for.
    """
    return _scatter_along(builder, self, dim, index, src, accumulate=False)


@lowers(aten.scatter_add.default)
def lower_scatter_add(builder: Builder, self: Value, dim: int, index: Value, src: Value) -> Value:
    """``self`` with ``src`` added along ``dim`` at the positions in ``index``.

    Raises NotLowered: where `scatter` does.
    """
    return _scatter_along(builder, self, dim, index, src, accumulate=True)


def _rows(
    builder: Builder, self: Value, dim: int, index: Value, source: Value, accumulate: bool
) -> Value:
    """Writes whole slices along ``dim`` at the positions in a vector."""
    if index.is_empty or self.is_empty:
        return self
    updates = updates_of_slices(builder, self, dim, index, source)
    return reshape(updated(builder, updates, accumulate), self.sizes)


@lowers(aten.index_add.default)
def lower_index_add(
    builder: Builder, self: Value, dim: int, index: Value, source: Value, *, alpha: Operand = 1
) -> Value:
    """``self`` with slices of ``alpha · source`` added along ``dim`` at the indices of a vector.

    Raises NotLowered: where `scatter` does.
    """

    source = Value(source.dtype, source.sizes, scaled(source.body, alpha))
    return _rows(builder, self, dim, index, source, accumulate=True)


@lowers(aten.index_copy.default)
def lower_index_copy(builder: Builder, self: Value, dim: int, index: Value, source: Value) -> Value:
    """``self`` with slices along ``dim`` replaced by those of ``source``, at a vector's indices."""
    return _rows(builder, self, dim, index, source, accumulate=False)


@lowers(aten.embedding_dense_backward.default)
def lower_embedding_backward(
    builder: Builder,
    grad_output: Value,
    indices: Value,
    num_weights: IntLike,
    padding_idx: IntLike,
    scale_grad_by_freq: bool,
) -> Value:
    """[num_weights, columns]: each row of the gradient added to the row that its index read.

    Rows of ``padding_idx`` stay 0; ``scale_grad_by_freq`` has a decomposition. Raises NotLowered:
    where `scatter` does.
    """
    out = builder.out
    initial = zeros(out.sizes, out.dtype)
    if grad_output.is_empty:
        return initial
    *rows, column = positions(grad_output.sizes)
    row = data_index(builder, indices.at(rows), out.sizes[0], 0)
    body = grad_output.body
    padded = not isinstance(padding_idx, Expr) and padding_idx >= 0
    if padded and isinstance(padding_idx, int):
        is_padding = apply("eq", row, padding_idx)
        body = where(is_padding, 0, body)
    return scatter(builder, initial, grad_output.sizes, [row, column], body, accumulate=True)
