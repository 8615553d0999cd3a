"""A graph that a pass of the compiler breaks is computed all the same, with one warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_webgpu_compile import FallbackWarning, compiler, counters, explain, fallbacks
from torch_webgpu_compile.capture.graph import passes as capture
from torch_webgpu_compile.capture.graph.passes import CAPTURE_PASSES, Draft
from torch_webgpu_compile.compiler import PASSES
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.ir.graph import Schedule
from torch_webgpu_compile.plan import cache

register()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    fallbacks.reset_warnings()
    cache.clear()
    yield
    torch._dynamo.reset()


def without_a_group(program: Any) -> Any:
    return program.map(lambda schedule: Schedule(schedule.graph, schedule.groups[1:]))


def failing(program: Any) -> Any:
    raise KeyError("no such buffer")


def unordered(draft: Draft) -> Draft:
    calls = [node for node in draft.module.graph.nodes if node.op == "call_function"]
    node, user = next((n, user) for n in calls for user in n.users if user in calls)
    user.append(node)
    return replace(draft)


def break_pass(monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[[Any], Any]) -> None:
    """Replaces a pass for Dynamo's graphs; eager operators keep it."""
    captures = any(step.name == name for step in CAPTURE_PASSES)
    steps = CAPTURE_PASSES if captures else PASSES
    (whole,) = (step for step in steps if step.name == name)

    def run(value: Any, state: Any) -> Any:
        captured = value.captured if captures else state.captured
        is_eager = not captured.name.startswith("graph")
        return whole.run(value, state) if is_eager else broken(value)

    wrong = tuple(replace(step, run=run) if step is whole else step for step in steps)
    if captures:
        monkeypatch.setattr(capture, "CAPTURE_PASSES", wrong)
    else:
        monkeypatch.setattr(compiler, "PASSES", wrong)


def loss(x: Tensor) -> Tensor:
    return torch.softmax(x @ x, -1).sin().sum()


def gradient(x: Tensor, **options: Any) -> Tensor:
    x = x.clone().requires_grad_()
    torch.compile(loss, backend="webgpu", options=options)(x).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize(
    ("name", "run", "message", "on_host"),
    [
        ("join_pairs", without_a_group, "without optional passes", False),
        ("join_pairs", failing, "without optional passes", False),
        ("order_groups", failing, "to PyTorch", True),
        ("take_seeds", failing, "to PyTorch", True),
        ("take_seeds", unordered, "after the pass take_seeds", True),
    ],
)
def test_gradients(
    monkeypatch: pytest.MonkeyPatch, name: str, run: Any, message: str, on_host: bool, device: str
) -> None:
    x = torch.randn(8, 8)
    wanted = x.clone().requires_grad_()
    loss(wanted).backward()
    break_pass(monkeypatch, name, run)
    before = counters.fallbacks.get("a graph", 0)
    with pytest.warns(FallbackWarning, match=message) as record:
        given = gradient(x.to(device))
    assert len(record) == 1
    assert "report" in str(record[0].message)
    torch.testing.assert_close(given.cpu(), wanted.grad)
    fallen = counters.fallbacks.get("a graph", 0) - before
    assert fallen == (2 if on_host and device == "cpu" else 0)


@pytest.mark.parametrize("name", ["join_pairs", "order_groups"])
def test_errors_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    break_pass(monkeypatch, name, failing)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such buffer"):
        gradient(torch.randn(8, 8), fallback="error")
    torch._dynamo.reset()
    monkeypatch.undo()
    assert gradient(torch.randn(8, 8), fallback="error").shape == (8, 8)


def test_the_report_has_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    break_pass(monkeypatch, "join_pairs", without_a_group)
    with pytest.warns(FallbackWarning, match="without optional passes"):
        report = explain(loss, torch.randn(8, 8))
    assert len(report.kernels) > 2
    assert not report.fallbacks
