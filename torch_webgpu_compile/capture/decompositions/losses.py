"""Margin losses, distances between rows, and gradients of adaptive pools.

Source: ATen ``LossMultiMargin``, ``DistanceOpsKernel.cpp``, ….
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # torch.nn._reduction


def _rows(value: Tensor) -> Tensor:
    """At least two dimensions: (samples, classes)."""
    return value.reshape(1, -1) if value.dim() < 2 else value


def _factor(reduction: int, samples: int, classes: int) -> float:
    return 1.0 / (samples * classes if reduction == _MEAN else classes)


def _scaled(gradient: Tensor, grad_output: Tensor, reduction: int, like: Tensor) -> Tensor:
    factor = grad_output.reshape(-1, 1) if reduction == _NONE else grad_output.reshape(1, 1)
    return (gradient * factor).view_as(like).to(like.dtype)


def multi_margin_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    p: float,
    margin: float,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Of Σ over classes but the target's of max(0, margin - x[target] + x)ᵖ / classes."""
    if self.numel() == 0:
        return torch.zeros_like(self)
    x = _rows(self)
    right = target.reshape(-1, 1)
    slack = margin - x.gather(1, right) + x
    grows = (slack > 0).to(x.dtype) * float(p)
    if p == 2:
        grows = grows * slack
    if weight is not None:
        grows = grows * weight[right]
    is_target = torch.arange(x.shape[1], device=x.device) == right
    grows = torch.where(is_target, 0.0, grows)
    gradient = torch.where(is_target, -grows.sum(1, keepdim=True), grows)
    gradient = gradient * _factor(reduction, *x.shape)
    return _scaled(gradient, grad_output, reduction, self)


def multilabel_margin_loss_forward(input: Tensor, target: Tensor, reduction: int) -> Any:
    """(loss, which classes are targets). A row of ``target`` ends at its first -1.

    PyTorch's decomposition adds the margins of class 0 for every target after the first -1.
    """
    x, labels = _rows(input), _rows(target)
    classes = labels.shape[1]
    position = torch.arange(classes, device=target.device)
    end = torch.where(labels == -1, position, classes).amin(-1, keepdim=True)
    counts = position < end
    wanted = x.gather(-1, torch.where(counts, labels, 0))
    is_target = (position == torch.where(counts, labels, -1).unsqueeze(-1)).any(1)
    margins = (1.0 - wanted.unsqueeze(-1) + x.unsqueeze(1)).clamp_min(0) / classes
    masked = torch.where(counts.unsqueeze(-1) & ~is_target.unsqueeze(1), margins, 0)
    losses = masked.sum((1, 2))
    if reduction == _MEAN:
        result = losses.mean()
    elif reduction == _SUM:
        result = losses.sum()
    else:
        result = losses if target.dim() == 2 else losses.reshape(())
    return result, is_target.to(input.dtype).reshape(target.shape)


def multilabel_margin_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """The gradient of the loss by ``self``.

    The loss is Σ over targets t and other classes c of max(0, 1 − x[t] + x[c]) / classes.
    """
    if self.numel() == 0:
        return torch.zeros_like(self)
    x, labels = _rows(self), _rows(target)
    valid = (labels < 0).cumsum(1) == 0
    labels = labels.clamp_min(0)
    slack = 1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)
    hits = (slack > 0) & valid.unsqueeze(2) & (_rows(is_target) == 0).unsqueeze(1)
    counts = hits.to(x.dtype)
    gradient = counts.sum(1).scatter_add(1, labels, -counts.sum(2))
    gradient = gradient * _factor(reduction, *x.shape)
    return _scaled(gradient, grad_output, reduction, self)


def adaptive_max_pool_backward(
    grad_output: Tensor, self: Tensor, indices: Tensor, *, rank: int
) -> Tensor:
    """[*, *space] of ``rank`` dimensions of space: each gradient added where the maximum was.

    Indices are row-major positions in the space.
    """
    if grad_output.numel() == 0:
        return torch.zeros_like(self)
    zeros = torch.zeros_like(self).flatten(-rank)
    added = zeros.scatter_add(-1, indices.flatten(-rank), grad_output.flatten(-rank))
    return added.view_as(self)


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
        slope = torch.where(difference == 0, 0.0, difference.sign() * ratio ** (p - 1))
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
    aten.multi_margin_loss_backward.default: multi_margin_loss_backward,
    aten.multilabel_margin_loss_forward.default: multilabel_margin_loss_forward,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_loss_backward,
    aten.adaptive_max_pool2d_backward.default: partial(adaptive_max_pool_backward, rank=2),
    aten.adaptive_max_pool3d_backward.default: partial(adaptive_max_pool_backward, rank=3),
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
    aten._cdist_backward.default: cdist_backward,
}
