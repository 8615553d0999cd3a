"""Limits, snapshots and recordings of memory; waits for it; generators of devices as objects."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_webgpu_compile import OutOfMemoryError
from torch_webgpu_compile.tensors import devices

webgpu: Any = torch.webgpu  # type: ignore[attr-defined]
MIB = 1 << 20


@pytest.fixture
def unlimited() -> Iterator[None]:
    yield
    webgpu.set_memory_limit(None)
    webgpu.memory._record_memory_history(None)
    webgpu.set_sync_debug_mode("default")


def test_a_limit_of_memory(unlimited: None) -> None:
    webgpu.empty_cache()
    before = webgpu.memory_allocated()
    webgpu.set_memory_limit(webgpu.memory_reserved() + 8 * MIB)
    kept = torch.ones(MIB, device="webgpu")
    with pytest.raises(webgpu.OutOfMemoryError, match="more than the limit") as error:
        torch.empty(2 * MIB, device="webgpu")
    assert isinstance(error.value, OutOfMemoryError)
    assert kept.sum().item() == MIB  # nothing else is lost
    del kept
    assert torch.empty(MIB, device="webgpu").numel() == MIB  # what is free is taken first
    assert torch.empty(4 * MIB, device="webgpu:1").numel() == 4 * MIB  # of another device
    assert webgpu.memory_allocated() - before < MIB
    webgpu.set_memory_limit(None)
    torch.empty(4 * MIB, device="webgpu")
    with pytest.raises(ValueError, match="cannot be negative"):
        webgpu.set_memory_limit(-1)


def test_a_fraction_of_memory(unlimited: None, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 64 * MIB
    monkeypatch.setattr(webgpu.memory, "recommended_max_memory", lambda device=None: total)
    assert webgpu.get_per_process_memory_fraction() == 1.0
    webgpu.empty_cache()
    webgpu.set_per_process_memory_fraction(0.25)
    assert webgpu.get_per_process_memory_fraction() == 0.25
    with pytest.raises(torch.OutOfMemoryError, match=r"more than the limit of 16\.0 MiB"):
        torch.empty(5 * MIB, device="webgpu")
    webgpu.set_per_process_memory_fraction(1.0, "webgpu:0")
    torch.empty(5 * MIB, device="webgpu")
    with pytest.raises(TypeError, match="must be `float`"):
        webgpu.set_per_process_memory_fraction(1)
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        webgpu.set_per_process_memory_fraction(1.5)


def test_the_memory_of_a_device() -> None:
    properties = webgpu.get_device_properties()
    if properties.total_memory_is_known:
        assert webgpu.recommended_max_memory() == properties.total_memory
    else:
        with pytest.raises(NotImplementedError, match=r"does not tell.*set_memory_limit\(\)"):
            webgpu.set_per_process_memory_fraction(0.5)
    assert webgpu.current_allocated_memory() == webgpu.memory_allocated()
    assert webgpu.driver_allocated_memory() == webgpu.memory_reserved()
    torch.ones(MIB, device="webgpu").cpu()
    assert webgpu.host_memory_stats()["allocated_bytes.current"] > 0
    nested = webgpu.host_memory_stats_as_nested_dict()
    assert nested["allocations"] == {"current": webgpu.host_memory_stats()["allocations.current"]}
    nested = webgpu.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == webgpu.memory_allocated()


def test_a_snapshot_lists_what_is_allocated() -> None:
    x = torch.empty(3 * MIB + 5, dtype=torch.uint8, device="webgpu")
    del x
    y = torch.empty(5 * MIB + 3, dtype=torch.uint8, device="webgpu")
    segments = [entry for entry in webgpu.memory_snapshot() if entry["device"] == 0]
    assert sum(entry["total_size"] for entry in segments) == webgpu.memory_reserved()
    assert sum(entry["allocated_size"] for entry in segments) == webgpu.memory_allocated()
    asked = {block["requested_size"]: block for entry in segments for block in entry["blocks"]}
    assert asked[y.nbytes]["state"] == "active_allocated"
    assert 3 * MIB + 5 not in asked
    ends = sorted((entry["address"], entry["total_size"]) for entry in segments)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ends))


def _allocate() -> torch.Tensor:
    return torch.empty(7 * MIB, dtype=torch.uint8, device="webgpu")


def test_a_recording_says_who_allocated(unlimited: None, tmp_path: Path) -> None:
    webgpu.empty_cache()
    memory = webgpu.memory
    memory._record_memory_history(max_entries=1000)
    x, y = _allocate(), _allocate()
    del x
    webgpu.empty_cache()
    file = tmp_path / "snapshot.pickle"
    memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())
    sizes = 7 * MIB
    blocks = [b for segment in snapshot["segments"] for b in segment["blocks"]]
    (block,) = [b for b in blocks if b["requested_size"] == sizes]
    assert [frame["name"] for frame in block["frames"]].index("_allocate") == 0
    trace = [entry for entry in snapshot["device_traces"][0] if entry["size"] == sizes]
    expected = ["segment_alloc", "alloc"] * 2 + ["free_requested", "free_completed", "segment_free"]
    assert [entry["action"] for entry in trace] == expected
    assert trace[1]["frames"][0]["name"] == "_allocate"
    assert trace[1]["addr"] == trace[-1]["addr"] != block["address"] == trace[3]["addr"]
    from torch.cuda import _memory_viz

    assert "_allocate" in _memory_viz.segments(snapshot, format_flamegraph=lambda text: text)
    assert _memory_viz.trace(snapshot)
    assert _memory_viz.trace_plot(snapshot)

    webgpu.set_memory_limit(webgpu.memory_reserved())
    with pytest.raises(torch.OutOfMemoryError):
        _allocate()
    webgpu.set_memory_limit(None)
    memory._record_memory_history("state", context="state", clear_history=True)
    z = _allocate()
    snapshot = memory._snapshot()
    assert snapshot["device_traces"][0] == []
    assert any(b["frames"] for segment in snapshot["segments"] for b in segment["blocks"])
    memory._record_memory_history(None)
    assert type(devices.get_device(0).pool).__name__ == "BufferPool"  # nothing is slower
    del y, z
    with pytest.raises(ValueError, match="'alloc'"):
        memory._record_memory_history(context="everything")


def test_errors_of_memory_are_recorded(unlimited: None) -> None:
    webgpu.memory._record_memory_history(skip_actions=["segment_alloc"])
    webgpu.empty_cache()
    webgpu.set_memory_limit(webgpu.memory_reserved())
    with pytest.raises(torch.OutOfMemoryError):
        _allocate()
    trace = webgpu.memory._snapshot()["device_traces"][0]
    assert [(e["size"], "addr" in e) for e in trace if e["action"] == "oom"] == [(7 * MIB, False)]
    assert "segment_alloc" not in {e["action"] for e in trace}


def test_waits_are_told(unlimited: None) -> None:
    x = torch.ones(3, device="webgpu")
    assert webgpu.get_sync_debug_mode() == 0
    webgpu.set_sync_debug_mode("warn")
    assert webgpu.get_sync_debug_mode() == 1
    y = x * 2
    with pytest.warns(UserWarning, match="waits for the GPU"):
        y.sum().item()
    webgpu.set_sync_debug_mode(2)
    for wait in (y.cpu, y.nonzero, y.tolist):
        with pytest.raises(RuntimeError, match=r"waits for the GPU.*keep values on the device"):
            wait()
    webgpu.synchronize()
    webgpu.set_sync_debug_mode(0)
    assert y.tolist() == [2, 2, 2]
    for wrong in ("loud", 3):
        with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
            webgpu.set_sync_debug_mode(wrong)


def test_default_generators() -> None:
    first, second = webgpu.default_generators
    assert isinstance(first, torch.Generator)
    assert first is webgpu.default_generators[0]
    assert second.device == torch.device("webgpu:1")
    first.manual_seed(3)
    assert webgpu.initial_seed() == first.initial_seed() == 3
    state = first.get_state()
    a = torch.rand(4, device="webgpu")
    first.set_state(state)
    b = torch.rand(4, device="webgpu", generator=first)
    assert torch.equal(a, b)
    assert first.get_offset() > 0
    first.set_offset(0)
    assert torch.equal(torch.empty(4, device="webgpu").uniform_(generator=first), a)
    assert pickle.loads(pickle.dumps(first)) is first
    with pytest.raises(NotImplementedError, match="get_state"):
        first.clone_state()


def test_amp() -> None:
    x = torch.ones(2, 2, device="webgpu")
    with webgpu.amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with webgpu.amp.autocast(False):
        assert (x @ x).dtype == torch.float32
    assert isinstance(webgpu.amp.GradScaler(2.0), torch.amp.GradScaler)
    assert webgpu.amp.GradScaler(2.0).scale(x).tolist() == [[2, 2], [2, 2]]

    class Double(torch.autograd.Function):
        @staticmethod
        @webgpu.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, value: Any) -> Any:
            return value * 2

        @staticmethod
        @webgpu.amp.custom_bwd
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 2

    with webgpu.amp.autocast():
        leaf = x.half().requires_grad_()
        result = Double.apply(leaf)
        result.sum().backward()
    assert result.dtype == torch.float32
    assert leaf.grad is not None


def test_what_a_device_has_not() -> None:
    assert not webgpu.is_current_stream_capturing()
    assert not webgpu.can_device_access_peer(0, 1)
    assert not webgpu.is_tf32_supported()
    webgpu.ipc_collect()


@pytest.mark.rotates(4)
def test_a_report_names_the_adapters() -> None:
    from torch.utils import collect_env

    text = collect_env.get_pretty_env_info()
    name = devices.get_device(0).info.name
    assert f"WebGPU adapters:\nwebgpu:0: {name} (" in text
    command = [sys.executable, "-m", "torch.utils.collect_env"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\nWebGPU adapters:\nwebgpu:0: " in run.stdout
    assert "\n[pip3] wgpu==" in run.stdout
