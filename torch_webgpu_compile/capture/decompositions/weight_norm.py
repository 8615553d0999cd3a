"""The gradients of weight normalization, w = v · g / |v|. Source: ATen ``WeightNorm.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """(the gradient of v, of g). Norms are over all dimensions but ``dim``, which they keep."""
    wide = torch.promote_types(saved_v.dtype, torch.float32)
    grad, v, g, norms = (x.to(wide) for x in (grad_w, saved_v, saved_g, saved_norms))
    others = [k for k in range(v.dim()) if k != dim % v.dim()]
    along = grad * v
    grad_g = (along.sum(others, keepdim=True) if others else along) / norms
    grad_v = (grad - v * (grad_g / norms)) * (g / norms)
    return grad_v.to(saved_v.dtype), grad_g.to(saved_g.dtype)


DECOMPOSITIONS: dict[Any, Any] = {
    aten._weight_norm_interface_backward.default: weight_norm_backward
}
