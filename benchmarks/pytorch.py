"""Eager PyTorch and Inductor, on CUDA where it is, else on the CPU."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .limits import synchronize, torch_device, use_full_f32
from .timing import seconds, seconds_per_call


def on_device(
    function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A copy of the model and of its inputs on PyTorch's device."""
    device = torch_device()
    if isinstance(function, nn.Module):
        function = copy.deepcopy(function).to(device)
    return function, tuple(x.to(device) for x in inputs)


def measure_eager(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], budget_s: float
) -> dict[str, Any]:
    use_full_f32()
    function, inputs = on_device(function, inputs)
    with torch.no_grad():
        return {"seconds": seconds_per_call(lambda: function(*inputs), synchronize, budget_s)}


def measure_compiled(
    function: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    budget_s: float,
    mode: str | None = None,
) -> dict[str, Any]:
    """Inductor; ``mode="reduce-overhead"`` is CUDA graphs.

    ``compile_again_s``: the same once more in this process, with Inductor's caches filled.
    """
    use_full_f32()
    function, inputs = on_device(function, inputs)
    result: dict[str, Any] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")  # off on purpose
        for name in ("compile_cold_s", "compile_again_s"):
            torch._dynamo.reset()
            compiled = torch.compile(function, mode=mode)

            def call(compiled: Callable[..., Any] = compiled) -> None:
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*inputs)

            result[name] = seconds(lambda call=call: (call(), synchronize()))
        result["seconds"] = seconds_per_call(call, synchronize, budget_s)
    return result
