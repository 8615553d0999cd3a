"""Rows of different lengths, one after the other, and the same rows in a padded tensor.

Source: ATen ``_jagged_to_padded_dense_forward``, ``_padded_dense_to_jagged_forward`` (FBGEMM's
kernels), with offsets of one dimension: row b is ``values[offsets[b] : offsets[b + 1]]``.
``torch.nested`` writes them for its jagged layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload

aten = torch.ops.aten


def to_padded(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0
) -> Any:
    """Rows of ``values`` (total, …) as (rows, length, …); what is longer is cut off."""
    if len(offsets) != 1:
        return NotImplemented
    (edges,), (length,) = offsets, max_lengths
    rows = edges.shape[0] - 1
    if values.shape[0] == 0:
        return values.new_full((rows, length, *values.shape[1:]), padding_value)
    place = torch.arange(length, device=values.device)
    starts, ends = edges[:-1, None], edges[1:, None]
    index = starts + place
    is_inside = index < ends
    found = values[torch.where(is_inside, index, 0)]
    return torch.where(_along(is_inside, found), found, padding_value).to(values.dtype)


def from_padded(dense: Tensor, offsets: Sequence[Tensor], total_L: int | None = None) -> Any:
    """Rows of ``dense`` (rows, length, …) as (total, …); 0 for what is longer than ``length``."""
    if len(offsets) != 1 or total_L is None:  # the offsets' last element is data
        return NotImplemented
    (edges,), (count, length) = offsets, dense.shape[:2]
    if count == 0 or length == 0:
        return dense.new_zeros((total_L, *dense.shape[2:]))
    place = torch.arange(total_L, device=dense.device, dtype=edges.dtype)
    row = torch.searchsorted(edges[1:].contiguous(), place, right=True).clamp(max=count - 1)
    column = place - edges[row]
    is_inside = column < length
    found = dense[row, torch.where(is_inside, column, 0)]
    return torch.where(_along(is_inside, found), found, 0).to(dense.dtype)


def _along(mask: Tensor, like: Tensor) -> Tensor:
    """A mask with dimensions of size 1 for the last ones of ``like``."""
    return mask.view(*mask.shape, *[1] * (like.dim() - mask.dim()))


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._jagged_to_padded_dense_forward.default: to_padded,
    aten._padded_dense_to_jagged_forward.default: from_padded,
}
