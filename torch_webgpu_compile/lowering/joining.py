"""Tensors put together: masked loads instead of copies. Source: ATen schemas of the same names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..dtypes import DType
from ..ir.scalar import Index, Scalar, apply, cast, const, loads_of
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, is_nonnegative
from .builder import Builder, masked, operand
from .registry import lowers
from .symbols import literal
from .value import Value, all_of, in_range, positions, reshape, slice_dim, unsqueeze, zeros
from .views import slice_start, wrapped

aten = torch.ops.aten


@lowers(aten.cat.default)
def lower_cat(builder: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """The tensors one after another along ``dim``, in their promoted dtype.

    Empty vectors among tensors of another rank are skipped, as in ATen.
    """
    out = builder.out
    parts = [t for t in tensors if not (t.rank == 1 and t.is_empty and len(out.sizes) != 1)]
    dim %= len(out.sizes)
    parts = [t for t in parts if t.sizes[dim] is not ZERO]
    if not parts:
        return zeros(out.sizes, out.dtype)
    return concatenated(builder, parts, dim, out.sizes, out.dtype)


def concatenated(
    builder: Builder, parts: Sequence[Value], dim: int, sizes: Sequence[Expr], dtype: DType
) -> Value:
    """Parts one after another along ``dim``; their other sizes are ``sizes``."""
    while len(_buffers_of(parts)) >= builder.target.max_storage_buffers:
        # A kernel has a buffer to write besides.
        most = builder.target.max_storage_buffers - 1
        parts = [_join(builder, group, dim, sizes, dtype) for group in _groups(parts, most)]
    return _join(builder, parts, dim, sizes, dtype)


def in_one_buffer(builder: Builder, values: Sequence[Value]) -> list[Value]:
    """Values of one dtype as parts of a buffer, for a kernel that cannot bind one for each."""
    flat = [reshape(value, [value.numel]) for value in values]
    both = concatenated(builder, flat, 0, [ZERO], values[0].dtype)
    start, found = ZERO, []
    for value in values:
        found.append(reshape(slice_dim(both, 0, start, value.numel), value.sizes))
        start = start + value.numel
    return found


def _buffers_of(parts: Sequence[Value]) -> set[str]:
    return {load.buffer for part in parts for load in loads_of(part.body)}


def _groups(parts: Sequence[Value], most: int) -> Iterator[Sequence[Value]]:
    """Divides parts into runs that read at most so many buffers, or are one part."""
    run: list[Value] = []
    for part in parts:
        if run and len(_buffers_of([*run, part])) > most:
            yield run
            run = []
        run.append(part)
    yield run


def _join(
    builder: Builder, parts: Sequence[Value], dim: int, others: Sequence[Expr], dtype: DType
) -> Value:
    """One value from parts that differ in the size of ``dim`` at most, with these other sizes."""
    sizes = list(others)
    sizes[dim] = ZERO
    for part in parts:
        sizes[dim] = sizes[dim] + part.sizes[dim]
    index = positions(sizes)
    along = index[dim]
    body: Scalar = const(0, dtype)
    start = ZERO
    pieces = []
    for part in parts:
        position = along - start
        at = [*index[:dim], ZERO if part.sizes[dim] is ONE else position, *index[dim + 1 :]]
        # Each piece is masked on both sides: the other branch of a mask may be evaluated anyway.
        condition = all_of(in_range(position, part.sizes[dim]))
        pieces.append((condition, cast(part.at(at), dtype)))
        start = start + part.sizes[dim]
    for condition, piece in reversed(pieces):
        body = masked(condition, piece, body)
    return builder.pointwise(body, tuple(sizes))


@lowers(aten.stack.default)
def lower_stack(builder: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """The tensors, of equal sizes, side by side in a new dimension before ``dim``."""
    return lower_cat(builder, [unsqueeze(t, dim) for t in tensors], dim)


@lowers(aten.constant_pad_nd.default)
def lower_constant_pad(
    builder: Builder, self: Value, pad: Sequence[IntLike], value: bool | int | float | Value = 0
) -> Value:
    """``self`` with ``value`` before and after the elements of its last dimensions.

    ``pad`` has pairs (before, after), from the last dimension on; a negative entry crops.
    """
    out = builder.out
    index = list(positions(out.sizes))
    conditions: list[Scalar] = []
    for k in range(len(pad) // 2):
        dim = self.rank - 1 - k
        position = index[dim] - pad[2 * k]
        conditions += in_range(position, self.sizes[dim])
        index[dim] = position
    fill = operand(value, (), out.dtype) if isinstance(value, Value) else literal(value, out.dtype)
    if self.is_empty:
        return Value(out.dtype, out.sizes, fill)
    return builder.pointwise(masked(all_of(conditions), self.at(index), fill), out.sizes)


@lowers(aten.slice_scatter.default)
def lower_slice_scatter(
    builder: Builder,
    self: Value,
    src: Value,
    dim: int = 0,
    start: IntLike | None = None,
    end: IntLike | None = None,
    step: int = 1,
) -> Value:
    """``self`` with ``self[start:end:step]`` along ``dim`` replaced by ``src``."""
    dim %= self.rank
    if src.is_empty:
        return self
    first = slice_start(builder, 3, start, self.sizes[dim])
    if builder.updates_argument:
        places = list(positions(src.sizes))
        places[dim] = first + places[dim] * int(step)
        element = cast(src.body, self.dtype)
        return builder.scatter(self, src.sizes, places, element)
    index = positions(self.sizes)
    offset = index[dim] - first
    inside = offset // int(step)
    conditions = []
    if not is_nonnegative(offset):
        conditions.append(Index(offset) >= 0)
    if int(step) != 1:
        conditions.append(apply("eq", Index(offset % int(step)), 0))
    conditions += [c for c in in_range(inside, src.sizes[dim]) if c not in conditions]
    at = [*index[:dim], inside, *index[dim + 1 :]]
    at = [ZERO if size is ONE else entry for size, entry in zip(src.sizes, at, strict=True)]
    body = masked(all_of(conditions), cast(src.at(at), self.dtype), self.body)
    return builder.pointwise(body, self.sizes)


@lowers(aten.select_scatter.default)
def lower_select_scatter(
    builder: Builder, self: Value, src: Value, dim: int, index: IntLike
) -> Value:
    """``self`` with the slice at ``index`` of ``dim`` replaced by ``src``."""
    dim %= self.rank
    chosen = wrapped(builder, 3, index, self.sizes[dim])
    if builder.updates_argument and not src.is_empty:
        places = list(positions(src.sizes))
        places.insert(dim, chosen)
        element = cast(src.body, self.dtype)
        return builder.scatter(self, src.sizes, places, element)
    at = positions(self.sizes)
    rest = [*at[:dim], *at[dim + 1 :]]
    condition = apply("eq", Index(at[dim]), Index(chosen))
    body = masked(condition, cast(src.at(rest), self.dtype), self.body)
    return builder.pointwise(body, self.sizes)


@lowers(aten.diagonal_scatter.default)
def lower_diagonal_scatter(
    builder: Builder, self: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """``self`` with a diagonal replaced by ``src``, whose last dimension runs along it."""
    dim1, dim2 = dim1 % self.rank, dim2 % self.rank
    index = positions(self.sizes)
    rest = [entry for k, entry in enumerate(index) if k not in (dim1, dim2)]
    along = index[dim1] - max(-offset, 0)
    on_diagonal = apply("eq", Index(index[dim2]), Index(index[dim1] + offset))
    conditions = [on_diagonal, *in_range(along, src.sizes[-1])]
    if src.is_empty:
        return self
    body = masked(all_of(conditions), cast(src.at([*rest, along]), self.dtype), self.body)
    return builder.pointwise(body, self.sizes)
