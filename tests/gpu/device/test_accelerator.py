"""``torch.accelerator``, and what of it PyTorch keeps from backends written in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_webgpu_compile.device.patches import accelerator

if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
    pytest.skip("another device is the accelerator here", allow_module_level=True)

acc: Any = torch.accelerator


def test_devices() -> None:
    assert acc.current_accelerator() == torch.device("webgpu")
    assert acc.current_accelerator(check_available=True) == torch.device("webgpu")
    assert acc.is_available()
    assert acc.device_count() == 2
    acc.set_device_index(1)
    assert acc.current_device_index() == torch.webgpu.current_device() == 1  # type: ignore[attr-defined]
    with acc.device_index(0):
        assert acc.current_device_index() == 0
    assert acc.current_device_index() == 1
    assert torch.get_device_module() is torch.webgpu  # type: ignore[attr-defined]


def test_streams() -> None:
    acc.synchronize()
    acc.synchronize("webgpu:1")
    stream = acc.current_stream(1)
    stream.synchronize()
    assert stream.device == torch.device("webgpu:1")
    acc.set_stream(stream)
    assert acc.current_device_index() == 1


def test_memory() -> None:
    x = torch.empty(1 << 20, dtype=torch.uint8, device="webgpu")
    assert acc.memory_allocated() >= x.nbytes
    assert acc.max_memory_allocated() >= acc.memory_allocated()
    assert acc.max_memory_reserved() >= acc.memory_reserved() >= x.nbytes
    assert acc.memory_stats()["allocated_bytes.all.current"] == acc.memory_allocated()
    acc.reset_peak_memory_stats()
    acc.reset_accumulated_memory_stats()
    acc.empty_cache()


def test_capability() -> None:
    if hasattr(acc, "get_device_capability"):
        assert torch.float32 in acc.get_device_capability()["supported_dtypes"]


def test_random_numbers() -> None:
    random = getattr(acc, "random", None)  # from PyTorch 2.14 on
    if random is not None:
        torch.manual_seed(5)
        assert random.initial_seed(1) == 5
        torch.rand(3, device="webgpu:1")
        state = torch.webgpu.get_rng_state("webgpu:1")  # type: ignore[attr-defined]
        assert torch.equal(random.get_rng_state(1), state)
        assert len(random.get_rng_state_all()) == 2


def test_generic_streams_and_events_are_the_devices() -> None:
    for stream in (torch.Stream(device="webgpu:1"), torch.Stream(1), torch.Stream("webgpu:1")):
        assert isinstance(stream, torch.Stream)
        assert stream == torch.webgpu.current_stream(1)  # type: ignore[attr-defined]
        stream.synchronize()
    start, end = (torch.Event(device, enable_timing=True) for device in (None, "webgpu"))
    start.record()
    torch.ones(8, device="webgpu").sum()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert isinstance(end, torch.Event)
    assert not isinstance(end, torch.Stream)
    assert type(torch.Event("cpu")) is torch.Event


def test_a_compiled_function_makes_generic_ones(fresh: None) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        stream, event = torch.Stream("webgpu"), torch.Event("webgpu")
        with stream:
            y = x + 1
        event.record()
        event.synchronize()
        return y

    compiled = torch.compile(function, backend="eager")
    assert compiled(torch.ones(1, device="webgpu")).item() == 2


def test_other_accelerators_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.current.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            assert acc.current_accelerator() == torch.device("cuda")
    finally:
        accelerator.current.cache_clear()
