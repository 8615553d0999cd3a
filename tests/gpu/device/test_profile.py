"""`torch_webgpu_compile.profile`: every dispatch once, with its times and its work."""

from __future__ import annotations

import json

import pytest
import torch

import torch_webgpu_compile
from tests.providers import device_in_use
from torch_webgpu_compile import DeviceError, profile

pytestmark = pytest.mark.rotates(3)


def layers(x, w):
    return torch.softmax(torch.relu(x @ w) @ w, -1)


def test_an_empty_one_says_how_to_fill_it():
    with profile() as found:
        layers(torch.randn(4, 4), torch.randn(4, 4))  # on the CPU
    for text in (str(found), found._repr_html_()):
        assert "No kernel ran" in text
        assert "torch.compile" in text


def test_a_compiled_model(tmp_path):
    torch._dynamo.reset()
    x, w = torch.randn(32, 64), torch.randn(64, 64)
    compiled = torch.compile(layers, backend="webgpu")
    compiled(x, w)
    with profile() as found:
        for _ in range(3):
            result = compiled(x, w)
    torch.testing.assert_close(result, layers(x, w), rtol=1e-4, atol=1e-4)
    assert len(found.runs) == 9  # two products and a softmax
    assert all(run.seconds >= 0 and run.nbytes > 0 for run in found.runs)
    starts = [run.start for run in found.runs]
    assert starts == sorted(starts)
    products = [total for total in found.kernels if "matmul" in total.name]
    assert sum(total.calls for total in products) == 6
    assert all(total.flops == total.calls * 2 * 32 * 64 * 64 for total in products)
    assert "test_profile.py" in products[0].source
    assert found.seconds == pytest.approx(sum(total.seconds for total in found.kernels))
    for text in (str(found), found._repr_html_()):
        assert all(total.name[:43] in text for total in found.kernels)

    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 9
    assert spans[0]["ts"] == 0
    compiled(x, w)
    assert len(found.runs) == 9  # nothing after the context


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 says so each time
def test_beside_a_trace_of_torch(tmp_path):
    x = torch.randn(32, 64, device="webgpu")
    (x @ x.T).cpu()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as of_torch,
        profile() as found,
        torch.profiler.record_function("my part"),
    ):
        (x @ x.T).cpu()
    of_torch.export_chrome_trace(str(tmp_path / "torch.json"))
    found.save_trace(tmp_path / "both.json", torch_trace=tmp_path / "torch.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    (part,) = [event for event in events if event.get("name") == "my part"]
    ours = [event for event in events if str(event.get("pid")).startswith("webgpu:")]
    kernels = [event for event in ours if event["ph"] == "X"]
    assert len(kernels) == len(found.runs) > 0
    second = 1e6  # clocks are apart by less; the epoch is decades ago
    for event in kernels:
        assert part["ts"] - second < event["ts"] < part["ts"] + part["dur"] + second

    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="export_chrome_trace"):
        found.save_trace(tmp_path / "both.json", torch_trace=tmp_path / "other.json")


def test_device_tensors_and_dynamic_sizes():
    device = torch.device("webgpu")
    torch.ones(3, device=device) * 2
    with profile() as found:
        for n in (5, 17):
            x = torch.ones(n, device=device)
            y = (x * 2).sum()
        assert y.item() == 34
    assert all(run.plan for run in found.runs)
    assert sum("mul" in run.name for run in found.runs) == 2
    sizes = [run.nbytes for run in found.runs if "mul" in run.name]
    assert sizes[0] < sizes[1]


def test_without_timestamps(monkeypatch):
    device = device_in_use()
    monkeypatch.setattr(device.backend, "submit_timed", lambda run, name: None)
    with profile() as found:
        (torch.ones(1000, device="webgpu") + 1).cpu()
    assert found.runs
    assert all(run.seconds > 0 for run in found.runs)


def test_an_error_ends_the_profile(monkeypatch):
    device = device_in_use()

    def fail(run, name):
        raise DeviceError("refused")

    def run():
        with profile():
            monkeypatch.setattr(device.backend, "submit_timed", fail)
            torch.ones(3, device="webgpu").add_(1)

    with pytest.raises(DeviceError, match="refused"):
        run()
    monkeypatch.undo()
    assert device.queue._watcher is None
    assert (torch.ones(3, device="webgpu") + 1).tolist() == [2, 2, 2]


def test_limits_are_plausible():
    with profile() as found:
        pass
    assert str(found)
    assert all(n.bytes_per_second > 1e8 and n.flops_per_second > 1e8 for n in found.limits)
    assert torch_webgpu_compile.profile is profile
