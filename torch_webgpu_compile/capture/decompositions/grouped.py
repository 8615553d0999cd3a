"""Products of groups of rows with a matrix each (mixture of experts). Source: ATen
``GroupedMMUtils``, and the operator that transformers puts in its place.

The rows of a group are padded to whole blocks, so that the product is a batched one: block times
the matrix of its group. Which matrix that is depends on data; a batched product reads it by an
index, without copying it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Rows of a block. Fewer make more products, more are padding in groups that have no more rows.
_FEWEST, _MOST = 8, 64


def grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Products of groups.

    Args:
        self, mat2: (M, K) and (G, K, N): groups of rows, the result is (M, N);
            (G, M, K) and (K, N): groups of columns, (M, N);
            (M, K) and (K, N): groups of terms, (G, M, N);
            (G, M, K) and (G, K, N), without ``offs``: (G, M, N).
        offs: where each group ends, int32, ascending. What is behind the last one is 0.
    """
    if bias is not None:
        return NotImplemented
    dtype = self.dtype if out_dtype is None else out_dtype
    if dtype != self.dtype:  # the sums, not the terms, are in the wider dtype
        self, mat2 = self.to(dtype), mat2.to(dtype)
    if offs is None:
        return torch.bmm(self, mat2)
    if self.dim() == 2 and mat2.dim() == 3:
        return _of_rows(self, mat2, offs)
    if self.dim() == 3:
        return _of_rows(mat2.t(), self.transpose(1, 2), offs).t()
    group = _groups(offs, self.shape[1])
    own = group == torch.arange(offs.shape[0], device=group.device)[:, None]
    return torch.matmul(torch.where(own[:, None], self, 0), mat2)


def _groups(offs: Tensor, count: Any) -> Tensor:
    """The group of each of ``count`` positions; the number of groups behind the last one."""
    return torch.searchsorted(offs, torch.arange(count, device=offs.device), right=True)


def _of_rows(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """(M, K) times (G, K, N): (M, N)."""
    count, last = rows.shape[0], offs.shape[0] - 1
    group = _groups(offs, count)
    inside, group = (group <= last)[:, None], group.clamp(max=last)
    if isinstance(count, int) and count <= 2 * (last + 1):  # hardly two of them share a matrix
        return torch.where(inside, torch.bmm(rows[:, None], matrices[group])[:, 0], 0)
    height = _height(count, last + 1)
    begins = _starts(offs)
    ends = torch.cumsum((offs - begins + (height - 1)) // height, 0)  # in blocks
    starts = _starts(ends)
    blocks = count // height + last + 1  # at most
    block, owner = torch.arange(blocks, device=rows.device), _groups(ends, blocks).clamp(max=last)
    place = torch.arange(height, device=rows.device)
    row = (begins[owner] + (block - starts[owner]) * height)[:, None] + place
    padded = torch.where((row < offs[owner][:, None])[..., None], rows[row.clamp(max=count - 1)], 0)
    products = torch.bmm(padded, matrices[owner]).flatten(0, 1)
    position = torch.arange(count, device=rows.device)
    return torch.where(inside, products[starts[group] * height + position - begins[group]], 0)


def _starts(ends: Tensor) -> Tensor:
    """Where each group begins, of where each ends."""
    return torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])


def _height(count: Any, groups: int) -> int:
    """Rows of a block, as many as a group has on average, a power of two."""
    if not isinstance(count, int):
        return _MOST // 2
    height = _FEWEST
    while height < _MOST and 2 * height * groups <= count:
        height *= 2
    return height


def _of_transformers_backward(
    input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of (S, K) times (G, K, N), of both."""
    return (
        grouped_mm(grad_output, weight.transpose(1, 2), offs),
        grouped_mm(input.t(), grad_output, offs),
    )


def of_transformers() -> dict[Any, Callable[..., Any]]:
    """The rules for transformers' operators, which are there once it is imported."""
    names: dict[str, Callable[..., Any]] = {
        "grouped_mm_fallback": grouped_mm,
        "grouped_mm_fallback_backward": _of_transformers_backward,
    }
    found = {getattr(torch.ops.transformers, name, None): rule for name, rule in names.items()}
    return {packet.default: rule for packet, rule in found.items() if packet is not None}


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: grouped_mm}
