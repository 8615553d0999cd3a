"""Attention written out against the fused operator: time of a call and of a training step, in ms.

python -m benchmarks.written_attention [--batch 8 --heads 16 --length 1024 --size 64 --repeats 20]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_webgpu_compile


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(value: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``masked_fill`` of what is later with a value."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], device=q.device).tril() == 0
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return F.softmax(scores.masked_fill(later, value), dim=-1) @ v

    return f


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The mean of the calls between two waits, after two others."""
    for _ in range(2):
        run()
    torch.webgpu.synchronize()  # type: ignore[attr-defined]
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.webgpu.synchronize()  # type: ignore[attr-defined]
    return (time.perf_counter() - start) / repeats * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("batch", 8), ("heads", 16), ("length", 1024), ("size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch_webgpu_compile.register_device()
    shape = options.batch, options.heads, options.length, options.size
    q, k, v = (torch.randn(shape).to("webgpu").requires_grad_() for _ in range(3))
    grad = torch.randn(shape).to("webgpu")
    # Causal as it is found; -1e4 is a mask that kernels evaluate, and pass over tiles by.
    cases = {"fused": fused, "-inf": written(-math.inf), "-1e9": written(-1e9)}
    for name, f in {**cases, "-1e4": written(-1e4)}.items():
        run = torch.compile(f, backend="webgpu")

        def call(run: Callable[..., Tensor] = run) -> None:
            with torch.no_grad():
                run(q, k, v)

        def step(run: Callable[..., Tensor] = run) -> None:
            torch.autograd.grad(run(q, k, v), (q, k, v), grad)

        forward, both = milliseconds(call, options.repeats), milliseconds(step, options.repeats)
        print(f"{name:6} {forward:8.3f} {both:8.3f}", flush=True)


if __name__ == "__main__":
    main()
