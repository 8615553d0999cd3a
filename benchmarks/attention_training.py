"""Gradients of attention, kernel by kernel and tiling by tiling.

``python -m benchmarks.attention_training [--small]`` prints milliseconds and TFLOP/s of the
products that a kernel really does: 2 in the forward, 3 for the queries' gradient, 4 for those of
keys and values. With CUDA, PyTorch's own attention in f32 stands beside them, forward and backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torch_webgpu_compile.codegen.tilings import choose as choice
from torch_webgpu_compile.codegen.tilings.attention_tilings import _GRADIENT_TILINGS
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.plan import cache as plan_cache

from .limits import synchronize, use_full_f32
from .timing import seconds_per_call

SHAPES = ((8, 16, 1024, 64), (1, 12, 1024, 64), (4, 16, 2048, 128), (2, 8, 2048, 256))
SMALL = ((1, 2, 128, 16),)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    plan_cache.clear()  # plans are remembered by what they compute, not by a patched choice
    return torch.compile(function, backend="webgpu", fullgraph=True, dynamic=False)


def _report(name: str, seconds: float, products: int, shape: tuple[int, ...]) -> None:
    batch, heads, length, size = shape
    flops = products * 2 * batch * heads * length**2 * size // 2  # causal: half of the scores
    print(f"  {name:58} {seconds * 1e3:9.3f} ms {flops / seconds / 1e12:7.2f} TFLOP/s", flush=True)


def measure(shape: tuple[int, int, int, int], dropout: float) -> None:
    """Prints the times of one shape: (batch, heads, length, head size), causal."""
    print(f"{shape}, dropout {dropout}")
    q, k, v, grad = (torch.randn(shape).to("webgpu") for _ in range(4))
    seed = torch.tensor([3, 5], dtype=torch.int32).to("webgpu") if dropout else None
    rest = True, shape[-1] ** -0.5, seed, dropout
    attend = _compiled(lambda q, k, v: torch.ops.webgpu.attention(q, k, v, None, *rest))
    output, logsumexp = attend(q, k, v)
    delta = (grad * output).sum(-1)
    wait = torch.webgpu.synchronize  # type: ignore[attr-defined]
    _report("forward with logsumexp", seconds_per_call(lambda: attend(q, k, v), wait), 2, shape)
    inputs = grad, q, k, v, None, logsumexp, delta
    backward = torch.ops.webgpu.attention_backward
    chosen = choice.choose_attention_gradient_tiling
    for tiling in (None, *_GRADIENT_TILINGS[:5]):
        if tiling is not None:
            choice.choose_attention_gradient_tiling = lambda *_, t=tiling: t
        label = "chosen" if tiling is None else str(tiling).removeprefix("AttentionGradientTiling")
        for name, products, which in (("dQ", 3, slice(0, 1)), ("dK dV", 4, slice(1, 3))):
            run = _compiled(lambda *x, w=which: backward(*x, *rest)[w])
            try:
                seconds = seconds_per_call(lambda run=run: run(*inputs), wait)
            except Exception as error:  # the tiling does not fit this adapter
                print(f"  {name} {label}: {str(error).splitlines()[0][:80]}")
                continue
            _report(f"{name} {label}", seconds, products, shape)
    choice.choose_attention_gradient_tiling = chosen


def measure_cuda(shape: tuple[int, int, int, int]) -> None:
    """PyTorch's attention in f32 on CUDA."""
    print(shape)
    use_full_f32()
    q, k, v, grad = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(4))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    once = seconds_per_call(forward, synchronize)
    _report("PyTorch on CUDA, forward", once, 2, shape)
    both = seconds_per_call(lambda: torch.autograd.grad(forward(), (q, k, v), grad), synchronize)
    _report("PyTorch on CUDA, backward", both - once, 5, shape)


def main() -> None:
    """Prints every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a size for software adapters")
    shapes = SMALL if parser.parse_args().small else SHAPES
    for shape in shapes if torch.cuda.is_available() else ():
        measure_cuda(shape)  # first: see `device.autoload.load`
    register()
    for shape in shapes:
        for dropout in (0.0, 0.1):
            measure(shape, dropout)


if __name__ == "__main__":
    main()
