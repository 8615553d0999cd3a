"""Products of matrices that PyTorch has kernels of for some devices only, and no decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def baddbmm_in_dtype(
    self: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    """``baddbmm.dtype``: beta · self + alpha · batch1 @ batch2, of (B, M, K) and (B, K, N).

    PyTorch's decomposition of ``baddbmm`` is registered for this overload, too, and takes the
    dtype, its fourth argument, for ``beta``.
    """
    product: Tensor = alpha * torch.bmm(batch1, batch2, out_dtype=out_dtype)
    return product if beta == 0 else product + beta * self.to(out_dtype)


def linear_backward(
    self: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``linear_backward``: the gradients of ``linear`` by its input, weight and bias (N,).

    Args:
        self: (..., K); ``grad_output``: (..., N), and ``weight``: (N, K). Of one output, both may
            be without N.
        output_mask: which gradients are wanted.
    """
    matrix = weight if weight.dim() == 2 else weight.unsqueeze(0)
    grad = grad_output if weight.dim() == 2 else grad_output.unsqueeze(-1)
    rows, inputs = _rows(grad), _rows(self)
    by_input, by_weight, by_bias = output_mask
    return (
        (rows @ matrix.conj()).view(self.shape) if by_input else None,
        (rows.t() @ inputs.conj()).view(weight.shape) if by_weight else None,
        rows.sum(0) if by_bias else None,
    )


def _rows(tensor: Tensor) -> Tensor:
    """Vectors as the rows of a matrix."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


DECOMPOSITIONS: dict[Any, Any] = {
    torch.ops.aten.baddbmm.dtype: baddbmm_in_dtype,
    torch.ops.aten.linear_backward.default: linear_backward,
}
