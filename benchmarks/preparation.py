"""What preparing weights is worth on this machine.

    python -m benchmarks.preparation             ResNet-50 on 8 and 32 images
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
from torch import Tensor

from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.runtime.device import device_for
from torch_webgpu_compile.target import Machine

from . import cases
from .webgpu import _allocated_nbytes, largest_difference, recorded_plans, replays

# name: what says how much memory may be kept
MODES = {
    "nothing prepared": Machine(prepared_divisor=1 << 60, small_nbytes=0),
    "prepared": Machine(),
    "everything prepared": Machine(prepared_divisor=1e-9),
}


@contextmanager
def mode(name: str) -> Iterator[None]:
    """The machine of a row of `MODES` in place of the device's."""
    device = device_for(resolve())
    target = device.target
    device.target = replace(target, machine=MODES[name])
    torch._dynamo.reset()
    try:
        yield
    finally:
        device.target = target


def measure(function: Callable[..., Any], inputs: tuple[Tensor, ...], budget_s: float) -> str:
    device = device_for(resolve())
    function = copy.deepcopy(function)  # whose weights are not on the GPU yet
    with torch.no_grad(), recorded_plans() as plans:
        wanted = function(*inputs)
        before = _allocated_nbytes(device)
        compiled = torch.compile(function, backend="webgpu")
        difference = largest_difference(compiled(*inputs), wanted)
        device.pool.reset_peak()
        compiled(*inputs)
        peak = device.pool.stats()["peak_allocated"] - before
    bound = plans[0]
    found = replays(bound, device, budget_s)
    return (
        f"{found['seconds'] * 1e6:9.1f} µs {found['gpu_s'] * 1e6:9.1f} µs "
        f"{bound.dispatch_count:4} dispatches {peak / 1e6:7.1f} MB {difference:.1e}"
    )


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


if __name__ == "__main__":
    main()
