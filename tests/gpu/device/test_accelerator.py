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


def test_generic_streams_and_events_do_not_wait() -> None:
    """C++ objects that Python cannot reach: use those of ``torch.webgpu`` to wait or to time."""
    stream, event = torch.Stream(device="webgpu"), torch.Event("webgpu", enable_timing=True)
    stream.synchronize()
    event.record()
    with pytest.raises(RuntimeError, match="doesn't support synchronizing events"):
        event.synchronize()
    with pytest.raises(RuntimeError, match="doesn't support elapsedTime"):
        event.elapsed_time(event)


def test_other_accelerators_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.current.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            assert acc.current_accelerator() == torch.device("cuda")
    finally:
        accelerator.current.cache_clear()
