"""Host time per dispatch, per call and per transfer of the runtime, on the best adapter.

python benchmarks/runtime_overhead.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))

from runtime_plans import chain_plan

from torch_webgpu_compile.runtime.device import Device, open_device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.profiler import time_steps


def microseconds(call: Callable[[], object], after: Callable[[], object], count: int = 20) -> float:
    """Median over ``count`` calls; ``after`` is not timed."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        after()
    return statistics.median(times) * 1e6


def replays(device: Device) -> None:
    """One compute pass of n tiny dispatches; every dispatch changes the pipeline."""
    for n in (1, 10, 100, 500):
        executor = Executor(chain_plan(16, n), device)
        start = time.perf_counter()
        bound = executor.bind()
        bind = (time.perf_counter() - start) * 1e6
        again = microseconds(executor.bind, lambda: None, 200)
        for _ in range(5):
            bound.replay()
        device.synchronize()
        replay = microseconds(bound.replay, device.synchronize, 50)
        print(
            f"{n:4} dispatches: bind {bind:8.0f} µs, bind again {again:.1f} µs, "
            f"replay {replay:7.1f} µs = {replay / n:6.2f} µs per dispatch"
        )
    print(f"GPU time per dispatch: {statistics.median(time_steps(bound)) * 1e6:.2f} µs")


def transfers(device: Device) -> None:
    """Upload and wait; download."""
    for nbytes in (4, 64 << 10, 1 << 20, 16 << 20, 256 << 20):
        buffer = device.allocate(nbytes)
        data = np.ones(nbytes, np.uint8)

        def upload(buffer: object = buffer, data: np.ndarray = data) -> None:
            device.upload(buffer, data)  # type: ignore[arg-type]
            device.backend.submit([], "upload")
            device.synchronize()

        up = microseconds(upload, lambda: None, 9)
        down = microseconds(lambda b=buffer, d=data: device.download(b, d), lambda: None, 9)
        print(
            f"{nbytes:>10} bytes: upload {up:9.0f} µs ({nbytes / up / 1e3:5.1f} GB/s), "
            f"download {down:9.0f} µs ({nbytes / down / 1e3:5.1f} GB/s)"
        )


if __name__ == "__main__":
    opened = open_device()
    print(opened)
    replays(opened)
    transfers(opened)
