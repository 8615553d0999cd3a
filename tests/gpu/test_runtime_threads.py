"""Threads that record, upload and free memory at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.gpu.runtime_plans import (
    SCALE_KERNEL,
    add_plan,
    buffer,
    dispatch,
    on_gpu,
    plan,
    read,
)
from tests.providers import PROVIDERS, device_of
from torch_webgpu_compile.runtime.device import Device
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.runtime.interface import Copy
from torch_webgpu_compile.runtime.queue import Recording


@pytest.fixture(params=PROVIDERS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = device_of(request.param)
    device.synchronize()
    yield device
    device.synchronize()


def test_threads_with_small_uploads(device: Device) -> None:
    executor = Executor(add_plan(4), device, max_programs=100)

    def work(seed: int) -> bool:
        launcher = executor.launcher()
        total, other = device.upload_new(np.zeros(4, np.float32)), device.allocate(16)
        for step in range(200):
            value = device.upload_small(np.full(4, seed * step, np.float32).tobytes())
            launcher([total, value, other])
            total, other = other, total
        return np.array_equal(read(device, total, 4), np.full(4, seed * sum(range(200))))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(1, 13)))


def test_threads_recording_at_once(device: Device) -> None:
    """Each thread scales a counter of its own many times; the batches mix them all."""
    steps = [dispatch(0, ["x", "y"], 64, [64, 2])]
    double = plan([SCALE_KERNEL], [buffer("x", "input", 64), buffer("y", "output", 64)], steps)

    def work(seed: int) -> bool:
        x = np.full(64, seed + 1, np.float32)
        executor = Executor(double, device)
        expected = x
        a, b = on_gpu(device, x), device.allocate(256)
        for step in range(60):
            executor.bind({}, {"x": a, "y": b}).replay()
            a, b = b, (device.allocate(256) if step % 3 else a)
            expected = expected * 2
            if step % 16 == 15:
                expected = expected / 2**16
                device.upload(a, expected)
        return np.array_equal(read(device, a, 64), expected)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(12)))


def test_threads_freeing_memory_while_others_record(device: Device) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            device.empty_cache()

    def work(seed: int) -> bool:
        x = np.full(64, seed + 1, np.float32)
        good = True
        for _ in range(20):
            y = device.allocate(256)
            gpu = on_gpu(device, x)
            device.queue.record(Recording([Copy(gpu.handle, 0, y.handle, 0, 256)], "copy"))
            del gpu
            good &= np.array_equal(read(device, y, 64), x)
        return good

    cleaner = threading.Thread(target=churn)
    cleaner.start()
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(8)))
    finally:
        stop.set()
        cleaner.join()
