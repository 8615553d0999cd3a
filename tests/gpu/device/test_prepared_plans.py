"""What is prepared once in plans, reports, profiles and graphs with steps on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_webgpu_compile
from tests.compiling import compiled
from tests.prepared_models import Convolutions, Mixing, check, dispatches
from torch_webgpu_compile import counters, explain
from torch_webgpu_compile.backend import compile_module
from torch_webgpu_compile.errors import DeviceError
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.runtime.executor import Executor

BOTH = pytest.mark.parametrize("place", ["cpu", "webgpu"])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@BOTH
def test_plans_from_disk(place: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    model = Convolutions().eval().to(place)
    x = torch.randn(2, 8, 12, 12).to(place)
    with torch.no_grad():
        for _ in range(2):
            plan_cache.clear()
            torch._dynamo.reset()
            hits = counters.plan_cache_hits
            function = compiled(model)
            check(function, model, x)
            model.layers[3].weight.mul_(2)
            check(function, model, x)
        assert counters.plan_cache_hits > hits


@BOTH
def test_what_people_see(place: str, tmp_path: Any) -> None:
    model = Convolutions().eval().to(place)
    x = torch.randn(2, 8, 12, 12).to(place)
    with torch.no_grad():
        report = explain(model, x)
        function = compiled(model)
        (graph,) = report.graphs
        assert len(graph.preparation) == 1
        assert report.dispatch_count == dispatches(function, x) - 1 == dispatches(function, x)
        assert str(report).count("(once) ") == 1
        report.save_html(tmp_path / "report.html")
        assert (tmp_path / "report.html").read_text().count("(once) ") == 1
        assert "in its preparation" in graph.texts["plan"]
        with torch_webgpu_compile.profile() as profile:
            model.layers[3].weight.mul_(2)
            function(x)
            function(x)
        plans = [run.plan for run in profile.runs if run.plan.endswith("_preparation")]
        assert len(plans) == 1


@BOTH
def test_a_bound_plan_needs_what_is_prepared(place: str) -> None:
    found: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_module(module, inputs, resolve(), lambda *entry: found.append(entry))

    model = Mixing().eval().to(place)
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    ((state, device, _),) = found
    with pytest.raises(DeviceError, match=r"prepared\(\)"):
        Executor(state.plan, device).bind()


@BOTH
def test_host_steps(place: str) -> None:
    """A graph part of which runs on the host."""

    class Inverting(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.linalg.pinv(x)

    model = Inverting().eval().to(place)
    function = compiled(model, options={"fallback": "silent"})
    x = torch.randn(16, 16).to(place)
    with torch.no_grad():
        for _ in range(3):
            before = sum(counters.fallbacks.values())
            check(function, model, x)
            assert sum(counters.fallbacks.values()) > before
            model.weight.mul_(2)
