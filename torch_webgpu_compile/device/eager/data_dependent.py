"""Operators whose results have sizes that depend on data: masks as indices, counting, unique.

Kernels work on as many elements as the arguments have, whatever they choose: equal sizes run the
same kernels. Only the number of chosen elements, or one or two others, comes to the host, to make
the result.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload
from .compiled_op import check_index_device
from .dispatch import run
from .host import run_on_host

aten = torch.ops.aten
_index = aten.index.Tensor
_index_put = aten.index_put_.default

_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Choice:
    """A mask in row-major order.

    Attributes:
        mask: bool (n,).
        ranks: int32 (n,): of each element, how many are chosen before the next one.
        count: how many are chosen.
    """

    mask: Tensor
    ranks: Tensor
    count: int

    @staticmethod
    def of(mask: Tensor) -> Choice:
        """The elements of a bool mask, in row-major order; waits for the GPU to count them."""
        flat = mask.reshape(-1)
        ranks = flat.cumsum(0, dtype=torch.int32)
        return Choice(flat, ranks, int(ranks[-1].item()))

    def take(self, rows: Tensor) -> Tensor:
        """The rows whose elements are chosen; ``rows`` has as many as the mask has elements."""
        count = len(rows)
        places = torch.where(self.mask, self.ranks - 1, count)  # the others go to one row more
        table = torch.empty((count + 1, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        run(_index_put, table, [places], rows)
        result = torch.empty((self.count, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        return result.copy_(table[: self.count])

    def put(self, rows: Tensor, values: Tensor, accumulate: bool) -> Tensor:
        """n rows with the chosen ones replaced by, or increased by, ``values`` in order."""
        given = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        given[: self.count].copy_(values)
        spread = given.index_select(0, (self.ranks - 1).clamp_min(0))
        mask = self.mask.view(-1, *[1] * (rows.dim() - 1))
        return torch.where(mask, rows + spread if accumulate else spread, rows)


def equal(tensor: Tensor, other: Tensor) -> bool:
    """``aten::equal``: whether two tensors are equal; waits for the GPU."""
    if tensor.dtype is not other.dtype:
        raise RuntimeError(
            f"Expected all tensors to have the same dtype, but found {tensor.dtype} and "
            f"{other.dtype}"
        )
    return tensor.shape == other.shape and bool((tensor == other).all().item())


def nonzero(tensor: Tensor) -> Tensor:
    """``aten::nonzero``: int64 (n, rank) positions; waits for the GPU to count them."""
    count = 0
    if tensor.numel():
        choice = Choice.of(tensor if tensor.dtype is torch.bool else tensor != 0)
        count = choice.count
    # One dimension after the other in memory, as PyTorch's own kernels have it.
    sizes, strides = (count, tensor.dim()), (1, count)
    result = torch.empty_strided(sizes, strides, dtype=torch.int64, device=tensor.device)
    if count and tensor.dim():
        position = choice.take(torch.arange(tensor.numel(), device=tensor.device))
        for row, size in reversed(list(zip(result.t(), tensor.shape, strict=True))):
            row.copy_(position % size)
            position = position // size
    return result


def masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    """``aten::masked_select``."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    if math.prod(shape) == 0:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return Choice.of(mask.expand(shape)).take(tensor.expand(shape).reshape(-1))


def index(tensor: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """``aten::index.Tensor``."""
    if not any(k is not None and k.dtype in _MASKS for k in indices):
        return run(_index, tensor, indices)
    mask = _leading_mask(tensor, indices)
    if mask is not None:
        return _chosen(tensor, mask)
    return run(_index, tensor, _without_masks(tensor, indices))


def _chosen(tensor: Tensor, mask: Tensor) -> Tensor:
    """``tensor[mask]``, with strides in the order of the tensor's strides."""
    rows, rest = range(mask.dim()), range(mask.dim(), tensor.dim())
    order = sorted(rest, key=tensor.stride, reverse=True)
    moved = tensor.permute(*rows, *order)
    chosen: Tensor = Choice.of(mask).take(moved.reshape(-1, *moved.shape[mask.dim() :]))
    return chosen.permute(0, *(1 + order.index(dim) for dim in rest))


def index_put_impl_(
    tensor: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    """``aten::_index_put_impl_``: ``tensor[indices] = values``, or ``+= values``."""
    if not any(k is not None and k.dtype in _MASKS for k in indices):
        run(_index_put, tensor, indices, values, accumulate)
        return tensor
    mask = _leading_mask(tensor, indices)
    if mask is None:
        run(_index_put, tensor, _without_masks(tensor, indices), values, accumulate)
    elif values.numel() == 1:
        run(_index_put, tensor, [mask], values, accumulate)
    else:
        choice, rest = Choice.of(mask), tensor.shape[mask.dim() :]
        shape = choice.count, *rest
        _check_values(values, shape)
        moved = values.to(tensor.device).expand(shape)
        rows = choice.put(tensor.reshape(-1, *rest), moved, accumulate)
        tensor.copy_(rows.view(tensor.shape))
    return tensor


def _check_values(values: Tensor, shape: Sequence[int]) -> None:
    sizes = [1] * (len(shape) - values.dim()) + list(values.shape)
    fits = len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))
    if not fits:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to "
            f"indexing result of shape {list(shape)}"
        )


def _leading_mask(tensor: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """The mask, if it is the only index, and the first one; on the tensor's device."""
    first, *others = indices
    if first is None or any(k is not None for k in others) or tensor.numel() == 0:
        return None
    _check_mask(tensor, first, 0)
    return None if first.dim() == 0 else _as_bool(first).to(tensor.device)


def _without_masks(tensor: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Positions in the place of masks: one index tensor for each dimension of a mask."""
    found: list[Tensor | None] = []
    for given in indices:
        if given is None or given.dtype not in _MASKS:
            found.append(given)
        else:
            _check_mask(tensor, given, len(found))
            found += _as_bool(given).to(tensor.device).nonzero().unbind(1)
    return found


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        return mask
    warnings.warn(
        "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead.",
        stacklevel=2,
    )
    return mask != 0


def _check_mask(tensor: Tensor, mask: Tensor, dim: int) -> None:
    check_index_device(tensor, mask)
    for k, size in enumerate(mask.shape):
        if dim + k >= tensor.dim():
            raise IndexError(
                f"too many indices for tensor of dimension {tensor.dim()} (got {dim + k + 1})"
            )
        if tensor.shape[dim + k] != size:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {k} does not match the shape "
                f"of the indexed tensor {list(tensor.shape)} at index {dim + k}"
            )


def _numbers(*values: Tensor) -> list[int]:
    """Integers from the GPU, in one download."""
    found: list[int] = torch.stack([value.to(torch.int64) for value in values]).tolist()
    return found


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``aten::bincount``."""
    if self.dim() != 1 or self.is_floating_point() or self.dtype is torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    low, high = _numbers(*self.aminmax()) if self.numel() else [0, -1]
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is None or not self.numel():
        weights = torch.ones(self.shape, dtype=torch.int64, device=self.device)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    totals = torch.zeros(max(minlength, high + 1), dtype=weights.dtype, device=self.device)
    return totals.index_add_(0, self.to(torch.int64), weights)


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """``aten::repeat_interleave.Tensor``: each position k, ``repeats[k]`` times, in order."""
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if not repeats.numel():
        return torch.empty_like(repeats)
    ends = repeats.cumsum(0)
    if output_size is None:
        output_size, lowest = _numbers(ends[-1], repeats.amin())
        if lowest < 0:
            raise RuntimeError("repeats can not be negative")
    place = torch.arange(output_size, device=repeats.device)
    return torch.searchsorted(ends, place, right=True).to(repeats.dtype)


def unique(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_unique2``: (distinct values, each element's position there, their counts)."""
    if not self.numel():
        return unique_consecutive(self, return_inverse, return_counts)
    values, order = self.reshape(-1).sort()
    found, places, counts = unique_consecutive(values, return_inverse, return_counts)
    if return_inverse:
        places = torch.empty_like(places).index_copy_(0, order, places).view(self.shape)
    return found, places, counts


def unique_dim(
    self: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::unique_dim``: what is different along a dimension, as rows in order, NaN last."""
    if _is_for_host(self, dim):
        return _on_host(torch.ops.aten.unique_dim.default, self, dim)
    if not self.numel():
        return unique_consecutive(self, dim=dim)
    order = _ranks_of_rows(_as_rows(self, dim)).argsort()
    found, places, counts = unique_consecutive(self.index_select(dim, order), True, True, dim)
    return found, torch.empty_like(places).index_copy_(0, order, places), counts


def unique_consecutive(
    self: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::unique_consecutive``; along a dimension with everything, asked for or not."""
    if dim is None:
        return _of_elements(self, return_inverse, return_counts)
    if _is_for_host(self, dim):
        return _on_host(torch.ops.aten.unique_dim_consecutive.default, self, dim)
    if not self.numel():
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return self.new_empty(self.shape), none, none.clone()
    rows = _as_rows(self, dim)
    starts = torch.ones(len(rows), dtype=torch.bool, device=self.device)
    starts[1:].copy_((rows[1:] != rows[:-1]).any(1))
    choice = Choice.of(starts)
    found = choice.take(self.movedim(dim, 0)).movedim(0, dim)
    places = choice.ranks.to(torch.int64) - 1
    return found, places, _counts(places, choice.count)


def _of_elements(
    self: Tensor, return_inverse: bool, return_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=self.device)
    flat = self.reshape(-1)
    if not flat.numel():
        return flat.clone(), none.view(self.shape) if return_inverse else none, none.clone()
    starts = torch.ones(flat.shape, dtype=torch.bool, device=self.device)
    starts[1:].copy_(flat[1:] != flat[:-1])
    choice = Choice.of(starts)
    places = choice.ranks.to(torch.int64) - 1
    counts = _counts(places, choice.count) if return_counts else none
    return choice.take(flat), places.view(self.shape) if return_inverse else none, counts


def _counts(places: Tensor, count: int) -> Tensor:
    """How often each of ``count`` places is there."""
    counts = torch.zeros(count, dtype=torch.int64, device=places.device)
    return counts.index_add_(0, places, torch.ones_like(places))


def _is_for_host(self: Tensor, dim: int) -> bool:
    """Whether an error is to be raised."""
    if self.is_complex() or not -self.dim() <= dim < self.dim():
        return True
    return list(self.shape).count(0) > (self.shape[dim] == 0)


def _on_host(op: OpOverload, self: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = run_on_host(op, (self, dim), {})
    return found


def _as_rows(self: Tensor, dim: int) -> Tensor:
    """A tensor as a matrix, with dimension ``dim`` as its rows."""
    return self.movedim(dim, 0).reshape(self.shape[dim], -1)


def _ranks_of_rows(rows: Tensor) -> Tensor:
    """int64 (n,): the places of n rows in lexicographic order; equal ones, and NaN, have one.

    Elements are ranked within their columns; then two neighbouring columns of ranks are one of
    pairs, which are ranked again, until one column is left.
    """
    keys = rows.t()
    while True:
        values, order = keys.sort(dim=1)
        differ = values[:, 1:] != values[:, :-1]
        if values.is_floating_point():  # NaN is the last, and differs from itself
            differ &= values[:, :-1] == values[:, :-1]
        ranks = torch.zeros(order.shape, dtype=torch.int64, device=rows.device)
        ranks[:, 1:].copy_(differ.cumsum(1))
        ranks = torch.empty_like(ranks).scatter_(1, order, ranks)
        columns = len(ranks)
        if columns == 1:
            return ranks[0]
        keys = ranks[0 : columns - 1 : 2] * len(rows) + ranks[1::2]
        if columns % 2:
            keys = torch.cat([keys, ranks[-1:]])
