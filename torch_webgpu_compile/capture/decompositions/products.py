"""Sums of batched products in a dtype of their own, for which PyTorch has only kernels of CUDA.

PyTorch's decomposition of ``baddbmm`` is registered for this overload, too, and takes the dtype,
its fourth argument, for ``beta``.
"""

from __future__ import annotations

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
    """``baddbmm.dtype``: beta · self + alpha · batch1 @ batch2, of (B, M, K) and (B, K, N)."""
    product: Tensor = alpha * torch.bmm(batch1, batch2, out_dtype=out_dtype)
    return product if beta == 0 else product + beta * self.to(out_dtype)


DECOMPOSITIONS: dict[Any, Any] = {torch.ops.aten.baddbmm.dtype: baddbmm_in_dtype}
