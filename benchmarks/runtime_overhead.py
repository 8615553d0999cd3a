"""Host time of the runtime on the best adapter: what an eager operator does, and whole plans.

python benchmarks/runtime_overhead.py
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))

import numpy as np
from runtime_plans import SCALE_KERNEL, buffer, chain_plan, dispatch, download, plan

from torch_webgpu_compile.plan.model import Plan
from torch_webgpu_compile.runtime.device import Device, GpuBuffer, open_device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.runtime.queue import MIN_BATCH

NUMEL = 64


def microseconds(device: Device, call: Callable[[], object], count: int, rounds: int = 50) -> float:
    """Least mean of ``count`` calls, over rounds that start on an idle GPU with nothing pending."""
    best = float("inf")
    for _ in range(rounds):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best * 1e6


def scale_plan() -> Plan:
    """y = 2x, with its length and factor as parameters."""
    step = dispatch(0, ["x", "y"], NUMEL, [NUMEL, 2])
    return plan([SCALE_KERNEL], [buffer("x", "input", NUMEL), buffer("y", "output", NUMEL)], [step])


def main() -> None:
    """Prints a line per figure."""
    device = open_device()
    print(device)

    def show(name: str, call: Callable[[], object], count: int = MIN_BATCH - 1) -> None:
        print(f"{name:48} {microseconds(device, call, count):8.2f} µs")

    executor = Executor(scale_plan(), device, max_programs=1000)
    externals = {"x": device.allocate(4 * NUMEL), "y": device.allocate(4 * NUMEL)}
    bound = executor.bind({}, externals)
    show("allocate and free 1 KiB", lambda: device.allocate(1024), 1000)
    show("record one dispatch", bound.replay)
    show("bind the same buffers", lambda: executor.bind({}, externals), 1000)
    show("bind the same buffers and record", lambda: executor.bind({}, externals).replay())

    many: list[GpuBuffer] = [device.allocate(4 * NUMEL) for _ in range(60)]
    pairs = itertools.permutations(many, 2)

    def bind_others() -> None:
        x, y = next(pairs)
        executor.bind({}, {"x": x, "y": y})

    show("bind other buffers", bind_others)

    def eager() -> None:
        x, y = next(pairs)
        executor.bind({}, {"x": x, "y": y}).replay()

    show("bind other buffers and record", eager)
    launcher = executor.launcher()
    pairs = itertools.permutations(many, 2)
    x, y = externals["x"], externals["y"]
    show("launch on the same buffers", lambda: launcher([x, y]))
    show("launch on other buffers", lambda: launcher(next(pairs)))

    def operator() -> None:
        launcher([x, device.allocate(4 * NUMEL)])

    show("allocate and launch", operator)
    data = bytes(16)
    show("upload_small of 16 bytes", lambda: device.upload_small(data))
    show("upload_new of 4 KiB", lambda: device.upload_new(bytes(4096)))
    for count in (1, 8, MIN_BATCH - 1):
        flush_us = []
        for _ in range(50):
            device.synchronize()
            for _ in range(count):
                bound.replay()
            start = time.perf_counter()
            device.queue.flush()
            flush_us.append((time.perf_counter() - start) * 1e6)
        best = min(flush_us)
        print(f"{f'flush of {count}':48} {best:8.2f} µs = {best / count:.2f} µs per dispatch")
    print("plans: encode and submit; until the result is on the host; on the GPU per dispatch")
    result = np.empty(16, np.float32)
    for count in (1, 10, 100, 500):
        chain = Executor(chain_plan(16, count), device).bind()

        def submit() -> None:
            chain.replay()  # noqa: B023
            device.queue.flush()

        def call() -> None:
            chain.replay()  # noqa: B023
            download(device, chain.buffer("y"), result)  # noqa: B023

        host, whole = microseconds(device, submit, 1), microseconds(device, call, 1)
        gpu = statistics.median(time_steps(chain)) * 1e6
        print(f"{count:4} dispatches {host:8.1f} µs {whole:8.1f} µs {gpu:6.2f} µs")


if __name__ == "__main__":
    main()
