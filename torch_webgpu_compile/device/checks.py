"""Kernels that check what the kernels on the GPU cannot: numbers are data to them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .dispatch import run

_uniform = torch.ops.aten.uniform_.default


def uniform_(
    tensor: Tensor, low: float = 0.0, high: float = 1.0, generator: torch.Generator | None = None
) -> Any:
    """``aten::uniform_``."""
    if low > high:
        raise RuntimeError(
            f"uniform_ expects to return a [from, to) range, but found from={low:g} > to={high:g}"
        )
    return run(_uniform, tensor, low, high, generator=generator)


def no_quantized_tensors(*_: Any, **__: Any) -> NoReturn:
    """``aten::quantize_per_tensor`` and its kin: their tensors need an allocator in C++."""
    raise NotImplementedError(
        "webgpu tensors cannot have quantized dtypes, which PyTorch is about to remove: import "
        "torch.ao.quantization.fx._decomposed and use torch.ops.quantized_decomposed, which "
        "quantizes to integers"
    )
