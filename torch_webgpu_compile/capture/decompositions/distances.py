"""Distances between rows and their gradients. Source: ATen ``DistanceOpsKernel.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _slope(difference: Tensor, distance: Tensor, p: float) -> Tensor:
    """The derivative of a p-norm by each component of its argument; 0 where the norm is 0."""
    if p == 1:
        return difference.sign()
    if p == 2:
        slope = difference / distance
    elif p == float("inf"):
        return difference.sign() * (difference.abs() == distance)
    else:
        ratio = difference.abs() / distance
        slope = difference.sign() * ratio ** (p - 1)
        slope = torch.where(difference == 0, 0.0, slope)
    return torch.where(distance == 0, 0.0, slope)


def _pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of every pair, in the order of ``torch.pdist``: row i has n - 1 - i pairs."""
    n = len(rows)
    row = torch.arange(n - 1, device=rows.device)
    starts = row * n - torch.div(row * (row + 1), 2, rounding_mode="floor")
    pair = torch.arange(n * (n - 1) // 2, device=rows.device)
    first = torch.searchsorted(starts, pair, right=True) - 1
    return first, pair - starts.index_select(0, first) + first + 1


def pdist(rows: Tensor, p: float = 2.0) -> Tensor:
    """The p-norm of the difference of every two rows."""
    if len(rows) < 2:
        return rows.new_empty(0)
    first, second = _pairs(rows)
    difference = rows.index_select(0, first) - rows.index_select(0, second)
    # PyTorch 2.11 keeps a dimension of one element whether it is asked to or not.
    found: Tensor = torch.linalg.vector_norm(difference, p, dim=-1, keepdim=True)
    return found.squeeze(-1)


def pdist_backward(grad: Tensor, rows: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient of `pdist` by the rows."""
    if p == 0 or len(rows) < 2:
        return torch.zeros_like(rows)
    first, second = _pairs(rows)
    difference = rows.index_select(0, first) - rows.index_select(0, second)
    change = _slope(difference, distances[:, None], p) * grad[:, None]
    return torch.zeros_like(rows).index_add(0, first, change).index_add(0, second, -change)


def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, distances: Tensor) -> Tensor:
    """The gradient of ``cdist`` by x1: grad and distances are (…, rows of x1, rows of x2)."""
    if p == 0 or 0 in grad.shape or x1.shape[-1] == 0:
        return torch.zeros_like(x1)
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    change = _slope(difference, distances.unsqueeze(-1), p) * grad.unsqueeze(-1)
    return change.sum(-2)


DECOMPOSITIONS: dict[Any, Any] = {
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
    aten._cdist_backward.default: cdist_backward,
}
