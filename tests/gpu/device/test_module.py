"""``torch.webgpu``: what users of ``torch.cuda`` reach for."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import Any

import pytest
import torch

from torch_webgpu_compile.errors import AdapterError
from torch_webgpu_compile.tensors import devices

webgpu: Any = torch.webgpu  # type: ignore[attr-defined]


def test_availability() -> None:
    assert webgpu.is_available()
    assert webgpu.device_count() == 2
    webgpu.init()
    assert webgpu.is_initialized()
    assert not webgpu._is_in_bad_fork()
    assert torch.get_device_module("webgpu") is webgpu


def test_public_names_are_documented() -> None:
    assert all(getattr(webgpu, name).__doc__ for name in webgpu.__all__)


@pytest.mark.parametrize("device", [1, "webgpu:1", torch.device("webgpu", 1)], ids=repr)
def test_set_device(device: Any) -> None:
    webgpu.set_device(device)
    assert webgpu.current_device() == 1
    webgpu.set_device(-1)
    assert webgpu.current_device() == 1
    assert torch.empty(2, device="webgpu").device == torch.device("webgpu", 1)


@pytest.mark.parametrize("device", [1, "webgpu:1", torch.device("webgpu:1")], ids=repr)
def test_device_context(device: Any) -> None:
    with webgpu.device(device):
        assert webgpu.current_device() == 1
        with webgpu.device(None):
            assert webgpu.current_device() == 1
    assert webgpu.current_device() == 0
    with webgpu.device_of(torch.empty(1, device="webgpu:1")):
        assert webgpu.current_device() == 1
    with webgpu.device_of(torch.empty(1)):
        assert webgpu.current_device() == 0


def test_current_device_belongs_to_a_thread() -> None:
    webgpu.set_device(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(webgpu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


def test_wrong_devices() -> None:
    with pytest.raises(AdapterError, match="webgpu:7 does not exist: there are 2"):
        webgpu.set_device(7)
    with pytest.raises(ValueError, match="Expected a webgpu device, but got: cpu"):
        webgpu.synchronize("cpu")
    with pytest.raises(AdapterError, match="webgpu:7 does not exist"):
        torch.empty(1, device="webgpu:7")


def test_properties() -> None:
    properties = webgpu.get_device_properties("webgpu:1")
    info = devices.get_device(1).info
    assert properties.name == webgpu.get_device_name() == info.name
    assert properties.backend == info.backend
    assert properties.total_memory > 0
    assert properties.total_memory_is_known == (info.type in ("cpu", "integrated"))
    assert properties.limits["max-buffer-size"] > 0
    assert properties.features == info.features
    assert torch.float32 in webgpu.get_device_capability()["native_dtypes"]
    assert webgpu.is_bf16_supported()
    assert not webgpu.is_bf16_supported(including_emulation=False)


def test_memory() -> None:
    webgpu.empty_cache()
    before = webgpu.memory_allocated()
    webgpu.reset_peak_memory_stats()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="webgpu")
    assert webgpu.memory_allocated() - before == 1 << 20
    del x
    assert webgpu.memory_allocated() == before
    assert webgpu.max_memory_allocated() - before >= 1 << 20
    assert webgpu.max_memory_reserved() >= webgpu.memory_reserved() >= before + (1 << 20)
    webgpu.empty_cache()
    assert webgpu.memory_reserved() < before + (1 << 20)
    webgpu.reset_peak_memory_stats()
    assert webgpu.max_memory_allocated() == webgpu.memory_allocated()
    stats = webgpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == webgpu.memory_allocated()
    assert "allocated" in webgpu.memory_summary()


@pytest.mark.parametrize("kind", ["cpu", "integrated", "discrete"])
def test_free_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = dataclasses.replace(devices.adapter_of(0), type=kind)
    monkeypatch.setattr(devices, "adapter_of", lambda index: info)
    if kind == "discrete":
        with pytest.raises(NotImplementedError, match="does not tell how much"):
            webgpu.mem_get_info()
        return
    free, total = webgpu.mem_get_info(1)
    assert 0 < free < total == webgpu.get_device_properties().total_memory
    is_first = not torch.cuda.is_available()
    if is_first and hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info("webgpu")[1] == total


def test_events_time_what_lies_between_them() -> None:
    start, end = webgpu.Event(enable_timing=True), webgpu.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    torch.ones(8, device="webgpu").sum()
    end.record()
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert isinstance(start, torch.Event)
    with pytest.raises(ValueError, match="enable_timing=True"):
        webgpu.Event().elapsed_time(end)


def test_streams_are_the_queue() -> None:
    stream = webgpu.Stream("webgpu:1")
    assert stream == webgpu.default_stream(1) != webgpu.current_stream()
    assert isinstance(stream, torch.Stream)
    with webgpu.stream(stream):
        assert webgpu.current_device() == 1
        event = stream.record_event()
    assert webgpu.current_device() == 0
    webgpu.current_stream().wait_event(event)
    webgpu.current_stream().wait_stream(stream)
    stream.synchronize()
    assert stream.query()
    assert event.device == torch.device("webgpu:1")
    with webgpu.stream(None):
        pass


def test_torch_device() -> None:
    device = torch.device("webgpu:1")
    assert repr(device) == "device(type='webgpu', index=1)"
    assert pickle.loads(pickle.dumps(device)) == device
    with torch.device("webgpu"):
        assert torch.ones(2).device == torch.device("webgpu:0")
        assert torch.tensor([1.0]).device == torch.device("webgpu:0")
    torch.set_default_device("webgpu:1")
    try:
        assert torch.get_default_device() == torch.device("webgpu:1")
        x = torch.arange(3.0)
        assert x.device == torch.device("webgpu:1")
        assert x.cpu().tolist() == [0, 1, 2]
        assert torch.rand(3).sum().item() > 0
    finally:
        torch.set_default_device(None)


def test_repr() -> None:
    assert repr(torch.ones(2, device="webgpu")) == "tensor([1., 1.], device='webgpu:0')"
    assert "device='webgpu:1', dtype=torch.float16" in repr(torch.ones(2, device="webgpu:1").half())
    assert "requires_grad=True" in repr(torch.ones(2, device="webgpu", requires_grad=True))


def test_methods_of_tensors_and_modules() -> None:
    x: Any = torch.ones(2)
    assert not x.is_webgpu
    y = x.webgpu()
    assert y.is_webgpu
    assert y.webgpu() is y
    assert y.webgpu(1).device == torch.device("webgpu:1")
    assert y.untyped_storage().is_webgpu
    assert x.untyped_storage().webgpu(1).device == torch.device("webgpu:1")
    module: Any = torch.nn.Linear(2, 2)
    assert module.webgpu().weight.device == torch.device("webgpu:0")
    packed: Any = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    assert packed.webgpu().is_webgpu
