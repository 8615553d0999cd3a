"""Ways of running one case in eager PyTorch, where the default is not always its fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Variant = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def memory_formats(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Iterator[Variant]:
    """cuDNN's layouts, with the algorithms that it measures to be its fastest."""
    cudnn = torch.backends.cudnn

    def fastest(*inputs: Tensor) -> Any:
        # Not `cudnn.flags`, whose defaults would switch TF32 on.
        before, cudnn.benchmark = cudnn.benchmark, True
        try:
            return function(*inputs)
        finally:
            cudnn.benchmark = before

    yield "contiguous", fastest, inputs
    last = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
    yield "channels_last", fastest, last


def attention_backends(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> Iterator[Variant]:
    """Each implementation of `scaled_dot_product_attention`; those that cannot do it raise."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def chosen(backend: Any) -> Callable[..., Any]:
        def call(*inputs: Tensor) -> Any:
            with sdpa_kernel(backend):
                return function(*inputs)

        return call

    yield "default", function, inputs
    for name in ("EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION", "MATH"):
        yield name.lower(), chosen(getattr(SDPBackend, name)), inputs
