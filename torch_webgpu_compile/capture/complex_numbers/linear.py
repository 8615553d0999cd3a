"""Operators that treat the real and the imaginary part alike: views, indexing, sums.

Such an operator is called once for each part. Arguments that hold elements (``self``, ``src``, a
number to fill with, …) are given by part; indices, masks and sizes are the same in both calls.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOp
from ...torch_private import tree_map, tree_map_only
from .pair import COMPONENTS, Pair, as_pair, join, separate
from .registry import ComplexCall, overloads, rule

aten = torch.ops.aten

_PACKETS = (
    # layout
    *(aten.permute, aten.transpose, aten.t, aten.expand, aten.squeeze, aten.unsqueeze),
    *(aten.select, aten.slice, aten.diagonal, aten.unfold, aten.split, aten.split_with_sizes),
    *(aten.unbind, aten.permute_copy, aten.transpose_copy, aten.expand_copy, aten.squeeze_copy),
    *(aten.unsqueeze_copy, aten.select_copy, aten.slice_copy, aten.diagonal_copy),
    *(aten.unfold_copy, aten.split_with_sizes_copy, aten.unbind_copy, aten.narrow_copy),
    aten.split_copy,
    # order
    *(aten.flip, aten.roll, aten.repeat, aten.tril, aten.triu, aten.cat, aten.stack),
    *(aten.constant_pad_nd, aten.replication_pad1d_backward, aten.replication_pad2d_backward),
    aten.replication_pad3d_backward,
    # indexing
    *(aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.take, aten.embedding),
    *(aten.index_put, aten._unsafe_index_put, aten.index_copy, aten.index_fill, aten.scatter_add),
    *(aten._unsafe_masked_index, aten.masked_fill, aten.masked_scatter, aten.put, aten.where),
    *(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.masked_select),
    # sums
    *(aten.neg, aten.sum, aten.cumsum, aten.avg_pool2d, aten.avg_pool3d),
    *(aten.avg_pool2d_backward, aten.avg_pool3d_backward),
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
    *overloads(aten.resolve_conj, aten.resolve_neg),
)


@rule(*overloads(*_PACKETS), *_MORE)
def by_parts(call: ComplexCall, *args: Any, **kwargs: Any) -> Any:
    """Calls the operator on each part."""
    names = [argument.name for argument in call.op._schema.arguments]
    positional = [_in_parts(call, n, value) for n, value in zip(names, args, strict=False)]
    given = positional, {n: _in_parts(call, n, value) for n, value in kwargs.items()}
    pairs = []
    for part in ("re", "im"):
        own, named = tree_map_only(Pair, attrgetter(part), given)
        pairs.append(call.op(*own, **named))
    return Pair(*pairs) if isinstance(pairs[0], Tensor) else list(map(Pair, *pairs))


def _in_parts(call: ComplexCall, name: str, value: Any) -> Any:
    """An argument with a pair for what differs between the parts: of numbers, one of numbers."""
    if name == "dtype" and value is not None:
        return COMPONENTS[value]

    def pair(leaf: Any) -> Any:
        if isinstance(leaf, (Pair, Tensor)):
            return as_pair(leaf, call.dtype)
        if isinstance(leaf, complex):
            return Pair(leaf.real, leaf.imag)  # type: ignore[arg-type]
        is_real = isinstance(leaf, (bool, int, float, torch.SymInt, torch.SymFloat))
        return Pair(leaf, 0.0) if is_real else leaf  # type: ignore[arg-type]

    return tree_map(pair, value) if name in _ELEMENTS else value


@rule(*_SAME)
def _same(call: ComplexCall, self: Pair, **_: Any) -> Pair:
    return self


@rule(
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.view_copy.default),
    *(aten._reshape_alias.default, aten.flatten.using_ints),
)
def _reshape(call: ComplexCall, self: Pair, *_: Any, **__: Any) -> Pair:
    # The parts may have other strides than the complex tensor, which allow no view.
    return self.map(lambda part: part.reshape(call.result.shape))


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
