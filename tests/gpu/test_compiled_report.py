"""`explain`, its HTML page, counters, doctor and what importing the package does."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_webgpu_compile
from tests.providers import has_provider
from torch_webgpu_compile import counters, fallbacks
from torch_webgpu_compile.__main__ import main
from torch_webgpu_compile.device.eager import dispatch
from torch_webgpu_compile.options import DEBUG_STAGES, resolve
from torch_webgpu_compile.runtime.device import device_for
from torch_webgpu_compile.target import Machine
from torch_webgpu_compile.tuning import machines

pytestmark = [pytest.mark.rotates(9), pytest.mark.usefixtures("fresh")]


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def test_explain():
    net, x = model(), torch.randn(3, 16)
    with torch.no_grad():
        report = torch_webgpu_compile.explain(net, x)
        torch.testing.assert_close(report.result, net(x))
    (graph,) = report.graphs
    assert graph.phase == "inference"
    assert report.dispatch_count == len(report.kernels) >= 2
    assert report.fallbacks == ()
    assert report.graph_breaks == ()
    ops = {op for kernel in report.kernels for op in kernel.ops}
    assert {"aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default"} <= ops
    for kernel in report.kernels:
        assert kernel.name
        assert kernel.kind
        assert "@compute" in kernel.wgsl
        assert min(kernel.grid) >= 1
        assert kernel.bytes_read > 0
        assert kernel.bytes_written > 0
    assert sum(kernel.flops for kernel in report.kernels) >= 2 * 3 * (16 * 32 + 32 * 4)
    assert {"fx", "ir", "order_groups", "wgsl", "plan"} <= set(graph.texts)
    assert "compiled in" in str(report)
    moved = graph.traffic
    assert moved.weights >= sum(p.nbytes for p in net.parameters())
    assert moved.state == 0
    assert report.copy_rate.bytes_per_second > 1e6
    assert f"{1 / report.copy_rate.seconds(moved):.4g} calls/s" in str(report)
    timestamps = "timestamp-query" in device_for(resolve()).target.features
    assert graph.timed_nbytes == (moved.nbytes if timestamps else 0)
    assert (graph.timed_seconds > 0) == timestamps
    assert set(graph.seconds) <= set(DEBUG_STAGES)
    for kernel in report.kernels:
        assert kernel.name in str(report)


class Decoder(nn.Module):
    """Two graphs that share a weight, the first of which writes into a cache."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.register_buffer("cache", torch.zeros(256, 64))

    def forward(self, x, position):
        cache = self.cache.index_copy_(0, position, self.linear(x))
        y = (cache.softmax(-1) @ cache.t()).softmax(-1) @ cache
        torch._dynamo.graph_break()
        return self.linear(y)


@pytest.mark.parametrize("device", ["webgpu", "cpu"])
def test_explain_tells_memory(device):
    net, rows = Decoder().to(device), torch.arange(4, device=device)
    with torch.no_grad():
        report = torch_webgpu_compile.explain(net, torch.randn(4, 64, device=device), rows)
    first, second = (graph.memory for graph in report.graphs)
    weight, cache = 64 * 64 * 4, 256 * 64 * 4
    assert (first.weights, first.state) == (weight, cache)
    assert (second.weights, second.state, second.other) == (weight, 0, 2 * cache)
    assert report.memory.weights == weight
    assert report.memory.state == cache
    between = cache if device == "webgpu" else 0  # the host has it in between
    assert report.memory.other == first.other + second.other - between
    assert f"memory: {first}" in str(report)
    assert "16.0 KiB of weights, 64.0 KiB that calls change, " in str(report)
    assert f"memory of all: {report.memory}" in str(report)
    assert f"memory: {first}" in report._page()


def test_memory_that_explain_tells_is_what_a_call_takes():
    def f(x, y):
        return ((x @ y).softmax(-1) @ x).softmax(-1) @ y

    x, y = (torch.randn(300, 300, device="webgpu") for _ in range(2))
    told = torch_webgpu_compile.explain(f, x, y).graphs[0].memory
    compiled = torch.compile(f, backend="webgpu")
    compiled(x, y)
    before = torch.webgpu.memory_allocated()
    torch.webgpu.reset_peak_memory_stats()
    result = compiled(x, y)
    taken = torch.webgpu.memory_allocated() - before
    assert told.other == 3 * taken > result.nbytes  # the arguments are as large
    assert told.activations == torch.webgpu.max_memory_allocated() - before - taken > 0


def test_explain_unwraps_compiled_functions():
    x = torch.randn(3)
    wrapped = torch.compile(lambda x: x.sin() + 1, backend="webgpu")
    assert torch_webgpu_compile.explain(wrapped, x).dispatch_count == 1
    module = torch.compile(model(), backend="webgpu")
    assert torch_webgpu_compile.explain(module, torch.randn(3, 16)).dispatch_count >= 2


def test_explain_training():
    net, x = model(), torch.randn(3, 16)

    def step(x):
        net(x).sum().backward()

    report = torch_webgpu_compile.explain(step, x)
    assert {graph.phase for graph in report.graphs} == {"forward", "backward"}


def test_every_kernel_of_a_training_step_names_its_origin():
    """A line of the user's code, or the module where all of the code is PyTorch's own."""
    net, x = model(), torch.randn(3, 16)

    def step(x):
        net(x).sum().backward()

    lines = torch_webgpu_compile.explain(step, x)
    assert all("net(x).sum().backward()" in k.sources[-1] for k in lines.kernels if k.flops)
    modules = torch_webgpu_compile.explain(net, x)
    found = {source for kernel in modules.kernels for source in kernel.sources}
    assert found == {"0 (Linear)", "1 (GELU)", "2 (LayerNorm)", "3 (Linear)"}
    assert "3 (Linear)" in str(modules)


def test_notebooks_show_a_report_in_a_frame():
    report = torch_webgpu_compile.explain(lambda x: x.sin() + 1, torch.randn(3))
    shown = report._repr_html_()
    assert shown.startswith("<iframe")
    assert shown.count("<iframe") == 1
    assert "<script" not in shown
    assert report.kernels[0].name in shown


def test_completion_offers_the_public_names():
    names = [name for name in dir(torch_webgpu_compile) if not name.startswith("_")]
    assert names == sorted(torch_webgpu_compile.__all__)
    assert all(getattr(torch_webgpu_compile, name).__doc__ for name in names)


def test_explain_lists_graph_breaks_and_fallbacks():
    def f(x):
        y = x @ x.t()
        torch._dynamo.graph_break()
        return torch.linalg.eigvalsh(y) + 1

    report = torch_webgpu_compile.explain(
        f, torch.randn(4, 4), webgpu_options={"fallback": "silent"}
    )
    assert len(report.graphs) == 2
    assert len(report.graph_breaks) == 1
    assert any("eigh" in op for op in report.fallbacks)
    assert "eigh" in str(report)


def test_the_users_line_under_a_default_device():
    def function(x):
        return F.gelu(x @ x)

    with torch.device("webgpu"):
        report = torch_webgpu_compile.explain(function, torch.ones(4, 4))
    assert "test_compiled_report.py" in str(report)
    assert "_device.py" not in str(report)


@pytest.mark.parametrize("anomalies", [False, True])
def test_the_users_line_in_a_backward_pass(anomalies):
    fallbacks.reset_warnings()
    dispatch.forget()
    matrix = torch.eye(3, device="webgpu", requires_grad=True)

    def train():
        solution = torch.linalg.lstsq(matrix, torch.ones(3, 1, device="webgpu")).solution
        solution.sum().backward()  # by a decomposition that the host computes

    forward = train.__code__.co_firstlineno + 1
    detect = torch.autograd.set_detect_anomaly(anomalies, check_nan=False)
    with detect, pytest.warns(torch_webgpu_compile.FallbackWarning) as seen:
        train()
    places = {str(each.message).split(".")[1]: (each.filename, each.lineno) for each in seen}
    assert places["linalg_lstsq"] == (__file__, forward)
    assert places["linalg_pinv"] == (__file__, forward + (not anomalies))


def test_explain_with_dynamic_sizes():
    def f(x):
        return x.softmax(-1)

    x = torch.randn(3, 16)
    torch._dynamo.mark_dynamic(x, 0)
    report = torch_webgpu_compile.explain(f, x)
    (kernel,) = report.kernels
    assert kernel.bytes_read == x.nbytes


class _Checker(HTMLParser):
    VOID = ("meta", "path", "rect", "br")

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        names = dict(attributes)
        assert not str(names.get("href", "#")).startswith("http")
        assert "src" not in names
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_html(tmp_path):
    def f(x):
        return model()(x) if False else torch.linalg.eigvalsh(x @ x.t()) < 3

    report = torch_webgpu_compile.explain(
        f, torch.randn(4, 4), webgpu_options={"fallback": "silent"}
    )
    path = tmp_path / "report.html"
    report.save_html(path)
    text = path.read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert "svg" in checker.seen
    for kernel in report.kernels:
        assert kernel.name in text
    assert "&lt;storage" in text  # WGSL is escaped


def test_counters():
    counters.reset()
    x = torch.randn(4, 8)
    f = torch.compile(lambda x: x.cos() * 3.25 + 17, backend="webgpu")
    f(x)
    f(x)
    assert counters.plans_compiled == 1
    assert counters.dispatches == 2
    assert counters.bytes_uploaded == counters.bytes_downloaded == 2 * x.nbytes
    assert "dispatches=2" in repr(counters)
    counters.reset()
    assert counters.dispatches == 0
    assert counters.fallbacks == {}


@pytest.fixture
def dawn():
    """Lists Dawn's adapters with the driver that it takes: once a process has done so, it holds."""
    return has_provider("wgpudawn")


def test_doctor(capsys, dawn, monkeypatch):
    monkeypatch.setenv("TORCH_WEBGPU_ADAPTER", "0,0")  # two webgpu devices
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "[0]" in printed
    assert "largest binding" in printed
    assert "passed on" in printed
    assert not dawn or "  wgpudawn\n    [0]" in printed


def test_doctor_measures(capsys, dawn, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    assert main(["doctor", "--measure"]) == 0
    assert "Not stored" in capsys.readouterr().out
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    assert main(["doctor", "--measure"]) == 0
    printed = capsys.readouterr().out
    assert "multiply-adds" in printed
    assert f"Stored in {tmp_path}" in printed
    machines._known.clear()  # as in a new process
    options = resolve()
    target = device_for(options).target
    found = machines.measured_target(target, options).machine
    assert found != target.machine == Machine()
    assert 0 < found.dispatch_seconds < 1
    assert found.bytes_per_second > 1e6
    assert found.flops_per_second > 1e6


def test_doctor_without_an_adapter(capsys, dawn, monkeypatch):
    from torch_webgpu_compile.runtime import device

    monkeypatch.setattr(device, "list_adapters", lambda _: [])
    assert main(["doctor"]) == 1
    assert "mesa-vulkan-drivers" in capsys.readouterr().out


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_is_light():
    out = run(
        "import sys, torch_webgpu_compile as w\n"
        "print('wgpu' in sys.modules, 'sympy' in w.__dict__, w.counters.dispatches)"
    )
    assert out.split() == ["False", "False", "0"]


def test_the_backend_needs_no_import():
    """Through the entry point when installed, else after importing the package."""
    run(
        "import importlib.metadata as m, torch\n"
        "if 'webgpu' not in m.entry_points(group='torch_dynamo_backends').names:\n"
        "    import torch_webgpu_compile\n"
        "x = torch.randn(5)\n"
        "got = torch.compile(lambda x: x * 2, backend='webgpu')(x)\n"
        "torch.testing.assert_close(got, x * 2)\n"
        "assert 'webgpu' in torch._dynamo.list_backends()"
    )


def test_recurrent_modules_need_no_settings():
    run(
        "import torch, torch_webgpu_compile\n"
        "m = torch.nn.LSTM(4, 6)\n"
        "x = torch.randn(3, 2, 4)\n"
        "with torch.no_grad():\n"
        "    got = torch.compile(m, backend='webgpu', fullgraph=True)(x)[0]\n"
        "    torch.testing.assert_close(got, m(x)[0])"
    )
