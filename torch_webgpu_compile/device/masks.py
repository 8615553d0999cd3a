"""Indexing with masks: how many elements are chosen is known only on the GPU.

Kernels work on as many elements as the mask has, whatever it chooses: equal sizes run the same
kernels. Only the number of chosen elements comes to the host, to make the result.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dispatch import run

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
        rest = tensor.shape[mask.dim() :]
        return Choice.of(mask).take(tensor.reshape(-1, *rest))
    return run(_index, tensor, _without_masks(tensor, indices))


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
    _check_mask(tensor, first, 0, 0)
    return None if first.dim() == 0 else _as_bool(first).to(tensor.device)


def _without_masks(tensor: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Positions in the place of masks: one index tensor for each dimension of a mask."""
    found: list[Tensor | None] = []
    for position, given in enumerate(indices):
        if given is None or given.dtype not in _MASKS:
            found.append(given)
        else:
            _check_mask(tensor, given, position, len(found))
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


def _check_mask(tensor: Tensor, mask: Tensor, position: int, dim: int) -> None:
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
