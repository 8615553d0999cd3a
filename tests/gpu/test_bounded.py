"""What a process keeps does not grow with what it has done."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.compiling import native
from torch_webgpu_compile.callables import device_graph, signature
from torch_webgpu_compile.callables.device_graph import DeviceGraph
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.device.eager import dispatch
from torch_webgpu_compile.runtime import buffers
from torch_webgpu_compile.runtime.launcher import Launcher
from torch_webgpu_compile.tensors import devices

pytestmark = pytest.mark.rotates(6)

autoload.register()


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (signature, device_graph):
        monkeypatch.setattr(module, "max_resolved_sizes", lambda _: 5)
    return 5


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Weak references to the graphs that are made."""
    made: list[weakref.ref[Any]] = []
    for kind in (HostGraph, DeviceGraph):
        original = kind.__init__

        def init(self: Any, *arguments: Any, _original: Any = original, **keywords: Any) -> None:
            made.append(weakref.ref(self))
            _original(self, *arguments, **keywords)

        monkeypatch.setattr(kind, "__init__", init)
    return made


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_sizes_of_a_compiled_model(device: str, few_sizes: int, graphs: Any) -> None:
    torch._dynamo.reset()
    net = model()
    compiled = native(copy.deepcopy(net).to(device), dynamic=True)
    own = devices.get_device(0)
    held = []
    lengths = [*range(2, 30), 2, 29, 7]
    with torch.no_grad():
        for number, n in enumerate(lengths):
            x = torch.randn(n, 8)
            got = compiled(x.to(device)).cpu()
            torch.testing.assert_close(got, net(x), rtol=1e-4, atol=1e-5)
            if number in (20, len(lengths) - 1):
                gc.collect()
                held.append(sum(not isinstance(r, Launcher) for r in own._reclaimable))
    (graph,) = (reference() for reference in graphs if reference() is not None)
    assert len(graph.signature._variants) == few_sizes
    most = graph.executor.max_programs if device == "cpu" else few_sizes
    assert len(graph.executor._launchers) <= most
    assert held[0] == held[1]


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_dropped_model_leaves_nothing(device: str, graphs: Any) -> None:
    torch._dynamo.reset()

    def run(training: bool) -> None:
        net = model().to(device)
        compiled = native(net, dynamic=True)
        for n in (3, 5, 6):
            result = compiled(torch.randn(n, 8, device=device))
            if training:
                result.sum().backward()

    for training in (True, False):
        with torch.set_grad_enabled(training):
            run(training)
    torch._dynamo.reset()
    dispatch.forget()  # eager operators are kept for the process
    gc.collect()
    assert len(graphs) >= 3
    assert [reference() for reference in graphs if reference() is not None] == []


def test_eager_signatures_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.forget()
    monkeypatch.setattr(dispatch, "_MAX_SIGNATURES", 50)
    for n in range(1, 120):
        got = torch.ones(n, device="webgpu") * (n + 0.5) - 1
        assert got[-1].item() == n - 0.5
        entries = dispatch._by_signature.values()
        assert sum(len(e) if isinstance(e, dict) else 1 for e in entries) <= 50
    assert dispatch._remembered <= 50


def test_sizes_of_an_eager_operator_are_bounded(few_sizes: int) -> None:
    dispatch.forget()
    for n in range(1, 60):
        assert torch.arange(n, device="webgpu").flip(0)[0].item() == n - 1
    found = [graph for known in dispatch._by_kind.values() for graph in known]
    assert found
    for compiled in found:
        assert len(compiled._graph.signature._variants) <= few_sizes
    dispatch.forget()


def test_memory_of_sizes_that_are_gone_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_IDLE_BATCHES", 32)
    device = devices.get_device(0)
    device.synchronize()
    device.empty_cache()
    start = device.pool.stats()["reserved"]
    nbytes, target = 1 << 20, device.allocate(4)
    for n in range(400):
        buffer = device.allocate(nbytes + n * (1 << 16))
        device.upload(buffer, bytes(4))
        device.copy(buffer, 0, target, 0, 4)  # an upload alone is no command that is submitted
        del buffer
        device.queue.flush()
    assert device.pool.stats()["reserved"] - start < 60 * (nbytes + 400 * (1 << 16))
    again = device.allocate(nbytes)  # what is used in between stays
    serial = again.serial
    del again
    assert device.allocate(nbytes).serial == serial
