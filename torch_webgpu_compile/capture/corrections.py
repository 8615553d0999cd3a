"""Decompositions of our own where PyTorch's give other results than its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # torch.nn._reduction


def multilabel_margin_loss_forward(input: Tensor, target: Tensor, reduction: int) -> Any:
    """PyTorch's adds the margins of class 0 for every target after the first -1."""
    shape = target.shape
    x, labels = torch.atleast_2d(input), torch.atleast_2d(target)  # type: ignore[no-untyped-call]
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
    return result, is_target.to(input.dtype).reshape(shape)


CORRECTIONS = {aten.multilabel_margin_loss_forward.default: multilabel_margin_loss_forward}
