"""The list of capture's passes: what each gives is verified, timed and kept for a reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.compilations import OPTIONS, TARGET
from torch_webgpu_compile.capture.control_flow import parts
from torch_webgpu_compile.capture.control_flow.parts import Divided
from torch_webgpu_compile.capture.eager.calls import TensorSpec
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.capture.graph import aot, passes
from torch_webgpu_compile.capture.graph.passes import CAPTURE_PASSES, Draft, State
from torch_webgpu_compile.capture.tracing import Rules
from torch_webgpu_compile.captured import CapturedGraph, Phase, verify_captured
from torch_webgpu_compile.compiler import compile_graph as compile_graph_to_plan
from torch_webgpu_compile.compiler import host_numbers, native_operators
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import HostStep, Plan, ReadNumber
from torch_webgpu_compile.plan.verify import verify_plan

aten = torch.ops.aten
Captured = tuple[CapturedGraph, Phase]


def captured(
    function: Callable[..., Any],
    *arguments: Any,
    grad: bool = False,
    plans: list[Plan] | None = None,
) -> list[Captured]:
    """The graphs of a function, which compute nothing; ``plans``: gets those that are composed."""
    found: list[Captured] = []
    plans = [] if plans is None else plans

    def compile_graph(graph: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        found.append((graph, phase))
        return lambda arguments: [None] * 99

    def plan(graph: CapturedGraph, phase: Phase) -> Plan:
        found.append((graph, phase))
        return compile_graph_to_plan(graph, phase, TARGET, OPTIONS, use_cache=False).plan

    def composed(plan: Plan, phase: Phase, static: frozenset[int]) -> aot.BoxedFunction:
        plans.append(plan)
        return lambda arguments: [None] * 99

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        hooks = aot.Hooks(
            host_numbers=host_numbers, shows=lambda name: True, plan=plan, composed=composed
        )
        aot.capture(module, inputs, compile_graph, native_operators(), hooks)
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad), torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return found


def attention(x: Tensor) -> Tensor:
    weights = torch.nn.functional.dropout(torch.softmax(x @ x.mT / 2, -1), 0.5)
    return torch.log_softmax(weights @ x + torch.arange(4), -1)


def test_a_training_graph_has_the_whole_way() -> None:
    (graph, _), *_ = captured(attention, torch.randn(2, 3, 8, 4, requires_grad=True), grad=True)
    names = [step.name for step in CAPTURE_PASSES if step.name != "divide"]
    assert list(graph.seconds) == names
    changed = ["replace_attention", "keep_seeds", "recompute_constants", "split_log_softmax"]
    assert {*changed, "take_seeds"} <= set(graph.texts) < set(names)
    assert "attend_as_written" in graph.texts["replace_attention"]
    assert "webgpu.seed" in graph.texts["keep_seeds"]
    assert "MUST_SAVE" in graph.texts["keep_seeds"]
    assert "_log_softmax.default" not in graph.texts["split_log_softmax"]
    assert "webgpu.seed" not in graph.texts["take_seeds"]


def test_parts_have_the_way_of_the_whole_graph() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2)[x > 0].nonzero().sum() * (1 + x.sum().item())

    graphs = captured(f, torch.randn(8))
    assert len(graphs) > 1
    for k, (graph, _) in enumerate(graphs):
        assert "divide" in graph.seconds
        assert "ReadNumber(" in graph.texts["divide"]
        assert "return (PlanOutput(" in graph.texts["divide"]
        assert f"_{k}" in graph.name or graph.name.count("_") == 2


def test_eager_calls_run_the_last_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WEBGPU_DEBUG", "take_seeds")
    arguments = TensorSpec(torch.float32, (4,), (1,)), 0.5, True
    call = capture_call(aten.native_dropout.default, arguments, {}, native_operators())
    assert list(call.captured.seconds) == ["take_seeds", "separate_complex"]
    assert list(call.captured.texts) == ["take_seeds"]
    assert "webgpu.seed" not in call.captured.texts["take_seeds"]


def _draft() -> Draft:
    ((graph, phase),) = captured(lambda x: torch.view_as_real(x * 1j) + 1, torch.randn(3) + 1j)
    assert phase.complex_inputs == {0}
    verify_captured(graph, phase)
    return Draft(graph, phase)


def test_an_error_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(draft: Draft, state: State) -> Draft:
        _, first, second, _ = draft.module.graph.nodes
        second.append(first)  # which it reads
        return replace(draft)

    wrong = tuple(replace(s, run=broken) if s.name == "take_seeds" else s for s in CAPTURE_PASSES)
    monkeypatch.setattr(passes, "CAPTURE_PASSES", wrong)
    with pytest.raises(VerificationError, match=r"after the pass take_seeds: .*topologically"):
        passes.run(_draft_alone(), State(Rules({}, frozenset())), passes.CALL)


def _draft_alone() -> Draft:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for op in (aten.relu.default, aten.neg.default):
        node.meta["val"] = torch.empty(2)
        node = graph.call_function(op, (node,))
    node.meta["val"] = torch.empty(2)
    graph.output((node,))
    module = GraphModule({}, graph)
    return Draft(CapturedGraph("graph0_inference", module, frozenset()), Phase("inference"))


@pytest.mark.parametrize(
    ("graph", "phase", "message"),
    [
        ({"static_inputs": frozenset({1})}, {}, "no argument 1"),
        ({"numbers": {"zf0": (0, 3)}}, {}, "no argument has the number zf0"),
        ({}, {"saved": frozenset({1})}, "no result 1"),
        ({}, {"forwarded": ((0, 0),)}, "result 0 is computed"),
        ({}, {"complex_inputs": frozenset({1})}, "no argument 1"),
        ({}, {"seeds": 2}, "2 seeds"),
    ],
)
def test_a_captured_graph_is_what_is_said_of_it(graph: Any, phase: Any, message: str) -> None:
    draft = _draft()
    with pytest.raises(VerificationError, match=message):
        verify_captured(replace(draft.captured, **graph), replace(draft.phase, **phase))


def test_a_captured_graph_has_no_complex_numbers() -> None:
    draft = _draft_alone()
    verify_captured(draft.captured, replace(draft.phase, complex_inputs=frozenset({0})))
    for node in draft.module.graph.nodes:
        node.meta["val"] = torch.empty(3, 2, dtype=torch.complex64)
    with pytest.raises(VerificationError, match="is complex"):
        verify_captured(draft.captured, draft.phase)


def test_a_divided_graph_is_a_composed_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps read only what is there."""
    found: list[Divided] = []

    class Division(parts.Division):
        def run(self) -> Divided:
            found.append(super().run())
            return found[-1]

    monkeypatch.setattr(passes, "Division", Division)
    plans: list[Plan] = []
    captured(lambda x: (x + 1).nonzero() * 2, torch.randn(8), plans=plans)
    (divided,), (plan,) = found, plans
    assert len(plan.plans or ()) == len(divided.parts)
    verify_plan(plan)
    text = serialize.dumps(plan)
    assert serialize.dumps(serialize.loads(text)) == text
    for steps in (plan.steps[1:], plan.steps[:-1]):
        with pytest.raises(VerificationError, match="is used before it is there"):
            verify_plan(replace(plan, steps=steps))


def test_sizes_that_data_decides_are_steps_without_a_host() -> None:
    def f(x: Tensor) -> Any:
        kinds, places, counts = torch.unique(
            (x * 2).long(), return_inverse=True, return_counts=True
        )
        chosen = (
            x[x > 0],
            x.masked_select(x < 0),
            x.int().unique_consecutive(),
            torch.bincount(places),
        )
        return x.nonzero(), *chosen, x.repeat_interleave(places), kinds, counts

    plans: list[Plan] = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured(f, torch.randn(8), plans=plans)
    (plan,) = plans
    assert not any(isinstance(s, HostStep) for inner in plan.all_plans for s in inner.steps)
    assert sum(isinstance(step, ReadNumber) for step in plan.steps) == 7
