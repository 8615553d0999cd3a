"""What preparing weights, and Winograd's convolutions, are worth on this machine.

    python -m benchmarks.preparation             ResNet-50 on 8 and 32 images, and single 3×3 layers
    python -m benchmarks.preparation --small     the same code on small sizes, to see that it runs

Each line has the time of a replay, GPU time summed over its dispatches, dispatches, peak memory,
and the largest difference from eager relative to the largest value.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_webgpu_compile import plan_cache
from torch_webgpu_compile.backend import device_for
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.scheduler import winograd
from torch_webgpu_compile.target import Machine

from . import cases
from .webgpu import _allocated_nbytes, largest_difference, recorded_plans, replays

NOTHING = Machine(prepared_divisor=1 << 60, small_nbytes=0)
EVERYTHING = Machine(prepared_divisor=1e-9)
# name: (what says how much memory may be kept, whether Winograd)
MODES = {
    "nothing prepared": (NOTHING, False),
    "prepared": (Machine(), False),
    "everything prepared": (EVERYTHING, False),
    "prepared, Winograd": (Machine(), True),
    "everything, Winograd": (EVERYTHING, True),
}


@contextmanager
def mode(name: str, always: bool = False) -> Iterator[None]:
    """A row of `MODES`; ``always``: Winograd wherever it is possible, not only where it pays."""
    machine, enabled = MODES[name]
    device = device_for(resolve())
    target, before = device.target, vars(winograd).copy()
    device.target = replace(target, machine=machine)
    vars(winograd).update(ENABLED=enabled)
    if always:
        vars(winograd).update(_pays=lambda *_: True, _PART_OF_A_CALL=1e-9)
    plan_cache.clear()  # its keys know nothing of Winograd's numbers
    torch._dynamo.reset()
    try:
        yield
    finally:
        device.target = target
        vars(winograd).update(before)


def measure(function: Callable[..., Any], inputs: tuple[Tensor, ...], budget_s: float) -> str:
    device = device_for(resolve())
    function = copy.deepcopy(function)  # whose weights are not on the GPU yet
    with torch.no_grad(), recorded_plans() as plans:
        wanted = function(*inputs)
        before = _allocated_nbytes(device)
        compiled = torch.compile(function, backend="webgpu")
        difference = largest_difference(compiled(*inputs), wanted)
        device.reset_peak_memory_stats()
        compiled(*inputs)
        peak = device.memory_stats()["peak_allocated"] - before
    bound = plans[0]
    found = replays(bound, device, budget_s)
    return (
        f"{found['seconds'] * 1e6:9.1f} µs {found['gpu_s'] * 1e6:9.1f} µs "
        f"{bound.dispatch_count:4} dispatches {peak / 1e6:7.1f} MB {difference:.1e}"
    )


def layer(channels: int) -> nn.Module:
    """A 3×3 convolution as in a bottleneck, between 1×1 ones whose layout is free."""
    return nn.Sequential(
        nn.Conv2d(4 * channels, channels, 1),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 4 * channels, 1),
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    budget_s = 0.2 if small else 2.0
    model, (images,) = cases.resnet50(small)
    for batch in (1,) if small else (8, 32):
        for name in MODES:
            with mode(name):
                x = images[:1].repeat(batch, 1, 1, 1)
                print(f"ResNet-50, {batch:2} {name:22}", measure(model, (x,), budget_s), flush=True)
    stages = ((16, 8),) if small else ((64, 56), (128, 28), (256, 14), (512, 7))
    for channels, side in stages:
        for batch in (2,) if small else (1, 8, 32):
            x = torch.randn(batch, 4 * channels, side, side)
            for name in ("everything prepared", "everything, Winograd"):
                with mode(name, always=True):
                    text = measure(layer(channels), (x,), budget_s)
                    print(f"{channels:3}×{side:2}² ×{batch:2} {name:22}", text, flush=True)


if __name__ == "__main__":
    main()
