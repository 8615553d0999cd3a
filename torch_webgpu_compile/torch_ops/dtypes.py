"""PyTorch's dtypes and the rows of the dtype table."""

from __future__ import annotations

import torch

from ..dtypes import DTYPES, DType

_TO_TORCH: dict[DType, torch.dtype] = {
    dtype: getattr(torch, dtype.name) for dtype in DTYPES if hasattr(torch, dtype.name)
}
_TO_DTYPE: dict[torch.dtype, DType] = {theirs: ours for ours, theirs in _TO_TORCH.items()}


def dtype_of(dtype: torch.dtype) -> DType | None:
    """The row of the dtype table, or None (complex, quantized, …)."""
    return _TO_DTYPE.get(dtype)


def torch_dtype(dtype: DType) -> torch.dtype:
    """PyTorch's name of a row of the dtype table."""
    return _TO_TORCH[dtype]


def opmath(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the dtype that PyTorch computes in: of 16-bit floats, float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
