"""Operators that treat the real and the imaginary part alike: views, indexing, sums.

Such an operator is called once for each part. Arguments that hold elements (``self``, ``src``, a
number to fill with, …) are given by part; indices, masks and sizes are the same in both calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOp
from ...torch_private import tree_map
from .pair import COMPONENTS, Pair, as_pair, join, separate
from .registry import ComplexCall, overloads, register, rule

aten = torch.ops.aten

_PACKETS = (
    # layout
    *(aten.permute, aten.transpose, aten.t, aten.expand, aten.squeeze, aten.unsqueeze),
    *(aten.select, aten.slice, aten.diagonal, aten.unfold, aten.split, aten.split_with_sizes),
    *(aten.unbind, aten.permute_copy, aten.transpose_copy, aten.expand_copy, aten.squeeze_copy),
    *(aten.unsqueeze_copy, aten.select_copy, aten.slice_copy, aten.diagonal_copy),
    *(aten.unfold_copy, aten.split_with_sizes_copy, aten.unbind_copy, aten.narrow_copy),
    *(aten.t_copy, aten.split_copy),
    # order
    *(aten.flip, aten.roll, aten.repeat, aten.tril, aten.triu, aten.cat, aten.stack),
    *(aten.constant_pad_nd, aten.diag_embed, aten.trace, aten.channel_shuffle),
    *(aten.pixel_shuffle, aten.pixel_unshuffle, aten.im2col, aten.col2im, aten.unfold_backward),
    *(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d),
    *(aten.reflection_pad1d_backward, aten.reflection_pad2d_backward),
    *(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d),
    *(aten.replication_pad1d_backward, aten.replication_pad2d_backward),
    *(aten.replication_pad3d_backward, aten.reflection_pad3d_backward),
    *(aten.select_backward, aten.slice_backward, aten.diagonal_backward),
    # indexing
    *(aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.embedding),
    *(aten.index_put, aten._unsafe_index_put, aten.index_copy, aten.index_fill, aten.scatter_add),
    *(aten._unsafe_masked_index, aten._unsafe_masked_index_put_accumulate),
    *(aten.masked_fill, aten.masked_scatter, aten.put, aten.where, aten.slice_scatter),
    *(aten.select_scatter, aten.diagonal_scatter, aten.masked_select),
    # sums
    *(aten.neg, aten.sum, aten.nansum, aten.cumsum, aten.avg_pool1d, aten.avg_pool2d),
    *(aten.avg_pool3d, aten.avg_pool2d_backward, aten.avg_pool3d_backward),
)
_MORE = (aten.scatter.src, aten.scatter.value)

# The arguments that hold elements of the tensors that an operator works on.
_ELEMENTS = frozenset(
    {"self", "other", "src", "source", "value", "values", "tensors", "input", "weight", "fill"}
    | {"grad", "grad_output", "grad_in"}
)
_SAME = (
    *overloads(aten.clone, aten.alias, aten.detach, aten.lift_fresh, aten.contiguous),
    *overloads(aten.lift_fresh_copy, aten.alias_copy, aten.detach_copy, aten.positive),
    *overloads(aten.resolve_conj, aten.resolve_neg, aten.lift),
)


def by_parts(call: ComplexCall, *args: Any, **kwargs: Any) -> Any:
    """Calls the operator on each part."""
    pairs = [call.op(*p, **k) for p, k in _parts(call, args, kwargs)]
    if isinstance(pairs[0], Tensor):
        return Pair(*pairs)
    return [Pair(re, im) for re, im in zip(*pairs, strict=True)]


def _parts(
    call: ComplexCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[list[Any], dict[str, Any]]]:
    """The arguments of the call on the real parts, and on the imaginary ones."""
    schema = call.op._schema.arguments
    found = []
    for part in (_real, _imaginary):
        positional = [
            _part(value, argument.name, part, call)
            for argument, value in zip(schema, args, strict=False)
        ]
        named = {name: _part(value, name, part, call) for name, value in kwargs.items()}
        found.append((positional, named))
    return found


def _part(value: Any, name: str, part: Any, call: ComplexCall) -> Any:
    if name == "dtype" and value is not None:
        return COMPONENTS[value]
    if name not in _ELEMENTS:
        return value
    return tree_map(lambda leaf: part(leaf, call.dtype), value)


def _real(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Pair):
        return value.re.to(dtype)
    if isinstance(value, Tensor):
        return value.to(dtype)
    return value.real if isinstance(value, complex) else value


def _imaginary(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Pair):
        return value.im.to(dtype)
    if isinstance(value, Tensor):
        return torch.zeros_like(value, dtype=dtype)
    if isinstance(value, complex):
        return value.imag
    return 0.0 if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat)) else value


for _op in (*overloads(*_PACKETS), *_MORE):
    register(_op, by_parts)


@rule(*_SAME)
def _same(call: ComplexCall, self: Pair, **_: Any) -> Pair:
    return self


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default)
def _reshape(call: ComplexCall, self: Pair, size: Any) -> Pair:
    # The parts may have other strides than the complex tensor, which allow no view.
    return self.map(lambda part: part.reshape(size))


@rule(aten._reshape_alias.default)
def _reshape_alias(call: ComplexCall, self: Pair, size: Any, stride: Any) -> Pair:
    return _reshape(call, self, size)


@rule(aten.flatten.using_ints)
def _flatten(call: ComplexCall, self: Pair, *_: Any, **__: Any) -> Pair:
    return _reshape(call, self, call.result.shape)


@rule(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(
    call: ComplexCall, self: Pair, size: Any, stride: Any, storage_offset: Any = None
) -> Pair:
    return separate(_memory(call, self).as_strided(*_joined(size, stride, storage_offset)))


@rule(aten.as_strided_scatter.default)
def _as_strided_scatter(
    call: ComplexCall, self: Pair, src: Any, size: Any, stride: Any, storage_offset: Any = None
) -> Pair:
    memory = _memory(call, self)
    value = join(as_pair(src, memory.dtype))
    layout = _joined(size, stride, storage_offset)
    return separate(torch.as_strided_scatter(memory, value, *layout))


def _joined(size: Any, stride: Any, offset: Any) -> tuple[Any, Any, Any]:
    """The layout of the real view (…, 2) of a complex layout."""
    return (*size, 2), (*(2 * s for s in stride), 1), None if offset is None else 2 * offset


def _memory(call: ComplexCall, value: Pair) -> Tensor:
    """The real view of a tensor in the layout that PyTorch gives it."""
    wanted = tuple(2 * s for s in call.arguments[0].stride())
    joined = join(value)
    if joined.stride()[:-1] != wanted or joined.stride(-1) != 1:
        raise UnsupportedOp(str(call.op), "it depends on a layout in memory", "use other views")
    return joined


@rule(aten.index_add.default)
def _index_add(
    call: ComplexCall, self: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1
) -> Pair:
    a, b = as_pair(self, call.dtype), as_pair(source, call.dtype)
    if alpha != 1:
        b = b * as_pair(alpha, call.dtype)
    return Pair(torch.index_add(a.re, dim, index, b.re), torch.index_add(a.im, dim, index, b.im))
