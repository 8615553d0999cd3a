"""Operators whose results have sizes that data decide, as a number that is read, and others.

Each counts what it will give, on the GPU, and reads the count: ``item`` is a step of a composed
plan. The rest are operators on tensors of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def _size(number: Tensor) -> Any:
    """A size that the GPU has computed."""
    size: Any = number.item()
    torch._check(size >= 0)
    return size


Chosen = Callable[[Tensor], Tensor]


def chosen(mask: Tensor) -> Tensor:
    """Flat positions of what is not 0, in order."""
    flat = (mask if mask.dtype is torch.bool else mask != 0).reshape(-1).to(torch.int64)
    count = _size(flat.sum())
    torch._check(count <= flat.shape[0])
    places = torch.arange(count, device=mask.device)
    return torch.searchsorted(flat.cumsum(0), places, right=True)


def _nonzero(chosen: Chosen, self: Tensor) -> Tensor:
    position, columns = chosen(self), []
    for size in reversed(self.shape):
        columns.append(position % size)
        position = position // size
    if not columns:
        return self.new_empty((position.shape[0], 0), dtype=torch.int64)
    return torch.stack(columns[::-1], 1)


def _masked_select(chosen: Chosen, self: Tensor, mask: Tensor) -> Tensor:
    tensor = self
    if self.shape != mask.shape:
        tensor, mask = torch.broadcast_tensors(self, mask)  # type: ignore[no-untyped-call]
    return tensor.reshape(-1).index_select(0, chosen(mask))


def _positions(chosen: Chosen, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Indices with positions in the place of masks; None where there are no masks."""
    if not any(k is not None and k.dtype in _MASKS for k in indices):
        return None
    found: list[Tensor | None] = []
    for given in indices:
        is_mask = given is not None and given.dtype in _MASKS
        found += _nonzero(chosen, given).unbind(1) if is_mask and given is not None else [given]
    return found


def _index(chosen: Chosen, self: Tensor, indices: Sequence[Tensor | None]) -> Any:
    found = _positions(chosen, indices)
    return NotImplemented if found is None else aten.index.Tensor(self, found)


def _putting(operation: OpOverload) -> Callable[..., Any]:
    """``tensor[indices] = values``, where a mask takes as many as it chooses, or the same one."""

    def put(
        chosen: Chosen,
        self: Tensor,
        indices: Sequence[Tensor | None],
        values: Tensor,
        accumulate: bool = False,
        *unsafe: bool,
    ) -> Any:
        is_same = all(type(size) is int and size == 1 for size in values.shape)
        found = None if is_same else _positions(chosen, indices)
        if found is None:
            return NotImplemented
        return operation(self, found, values, accumulate, *unsafe)

    return put


def _unique(
    chosen: Chosen,
    self: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    values, order = self.reshape(-1).sort()
    found, places, counts = _unique_consecutive(chosen, values, return_inverse, return_counts)
    if return_inverse:
        places = torch.zeros_like(places).index_copy(0, order, places).view(self.shape)
    return found, places, counts


def _unique_consecutive(
    chosen: Chosen,
    self: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    if dim is not None:
        return NotImplemented
    values, none = self.reshape(-1), self.new_empty(0, dtype=torch.int64)
    if math.prod(self.shape) == 0:
        return values.clone(), self.new_empty(self.shape, dtype=torch.int64), none
    is_new = torch.cat([values.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])
    starts = chosen(is_new)
    places, counts = none, none.clone()
    if return_inverse:
        places = (is_new.to(torch.int64).cumsum(0) - 1).view(self.shape)
    if return_counts:
        ends = torch.cat([starts[1:], starts.new_full((1,), values.shape[0])])
        counts = ends - starts
    return values.index_select(0, starts), places, counts


def _unique_pair(
    chosen: Chosen, self: Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[Tensor, Tensor]:
    found, places, _ = _unique(chosen, self, sorted, return_inverse)
    return found, places


def _repeat_interleave(_: Chosen, repeats: Tensor, *, output_size: int | None = None) -> Any:
    if output_size is not None or repeats.shape[0] == 0:
        return NotImplemented
    ends = repeats.to(torch.int64).cumsum(0)
    place = torch.arange(_size(ends[-1]), device=repeats.device)
    return torch.searchsorted(ends, place, right=True).to(repeats.dtype)


def _bincount(_: Chosen, self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    ends = torch.cat([self.to(torch.int64) + 1, self.new_full((1,), minlength, dtype=torch.int64)])
    if weights is None:
        weights = torch.ones_like(self, dtype=torch.int64)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    totals = torch.zeros(_size(ends.amax()), dtype=weights.dtype, device=self.device)
    return totals.index_add(0, self.to(torch.int64), weights)


SIZED_BY_DATA: Mapping[OpOverload, Callable[..., Any]] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    **{op: _putting(op) for op in (aten.index_put.default, aten.index_put_.default)},
    aten._index_put_impl_.default: _putting(aten._index_put_impl_.default),
    aten.bincount.default: _bincount,
    aten._unique.default: _unique_pair,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.repeat_interleave.Tensor: _repeat_interleave,
}
"""By operator: of what gives `chosen`, and its arguments. NotImplemented is a call as it is."""
