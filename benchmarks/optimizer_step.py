"""One AdamW step over the 148 parameters of GPT-2: dispatches, seconds of the first, time of later.

python -m benchmarks.optimizer_step [--width 768] [--steps 50]

The least traffic is that of the parameter, its gradient and both averages: 28 bytes a parameter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from torch_webgpu_compile import counters
from torch_webgpu_compile.device import autoload

FORMS = ("foreach", "fused", "compiled foreach", "compiled fused")


def shapes(width: int) -> list[tuple[int, ...]]:
    """Of GPT-2's parameters."""
    square, wide = (width, width), (width, 4 * width)
    layer = [(width,)] * 2 + [(width, 3 * width), (3 * width,), square, (width,)]
    layer += [(width,)] * 2 + [wide, (4 * width,), wide[::-1], (width,)]
    return [(50257, width), (1024, width), *layer * 12, (width,), (width,)]


def measure(form: str, width: int, steps: int) -> str:
    """A line of the report."""
    torch._dynamo.reset()
    synchronize = getattr(torch, "webgpu").synchronize  # noqa: B009  (not known to mypy)
    params = [nn.Parameter(torch.randn(shape, device="webgpu")) for shape in shapes(width)]
    for p in params:
        p.grad = torch.ones_like(p)
    fused = "fused" in form
    optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)
    step: Callable[[], object] = optimizer.step
    if form.startswith("compiled"):
        step = torch.compile(lambda: optimizer.step(), backend="webgpu")
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    counters.reset()
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    host = (time.perf_counter() - start) / steps
    synchronize()
    each = (time.perf_counter() - start) / steps
    rate = 28 * sum(p.numel() for p in params) / each / 1e9
    return (
        f"{form:17} {counters.dispatches // steps:4} dispatches  first {first:6.2f} s  "
        f"host {host * 1e6:7.0f} µs  step {each * 1e6:7.0f} µs  {rate:5.0f} GB/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    autoload.register()
    for form in FORMS:
        print(measure(form, options.width, options.steps), flush=True)


if __name__ == "__main__":
    main()
