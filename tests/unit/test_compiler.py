"""The list of passes: what it says of itself is true."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compilations import OPTIONS, TARGET, compile_function
from torch_webgpu_compile import compiler
from torch_webgpu_compile.capture.graph.passes import CAPTURE_PASSES
from torch_webgpu_compile.captured import Phase
from torch_webgpu_compile.compiler import PASSES, Compilation, Pass, passes
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.graph import AnchorGroup, Schedule
from torch_webgpu_compile.options import DEBUG_STAGES


class Block(nn.Module):
    """Has something for most passes: a table, a norm, a sibling pair, small maps, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 32)
        self.register_buffer("cache", torch.zeros(16, 32))

    def forward(self, x: Tensor, at: Tensor) -> Any:
        gated = nn.functional.silu(self.first(x)) * self.second(x)
        y = self.last(self.norm(gated)) @ torch.softmax(self.last.weight @ self.last.weight.T, -1)
        self.cache.index_copy_(0, at, y)
        return y.cumsum(0), self.cache.sum(1), x.exp(), x.flip(0).sqrt()


ARGUMENTS = torch.randn(4, 32), torch.arange(4)


def test_names() -> None:
    captured, compiled = ([step.name for step in steps] for steps in (CAPTURE_PASSES, PASSES))
    names = [*captured, "fx", *compiled]
    assert len(set(names)) == len(names)
    assert tuple(names) == tuple(stage for stage in DEBUG_STAGES if stage != "schedule")


@pytest.mark.parametrize("fusion", [True, False])
def test_each_pass_takes_what_the_one_before_gives(fusion: bool) -> None:
    chosen = passes(replace(OPTIONS, fusion=fusion))
    for before, after in pairwise(chosen):
        assert before.gives is after.takes
    assert chosen[0].takes is compiler.CAPTURED
    assert chosen[-1].gives is compiler.PLAN


def test_without_fusion_there_is_a_kernel_per_node() -> None:
    state = compile_function(Block().eval(), *ARGUMENTS, options=replace(OPTIONS, fusion=False))
    for schedule in state.program.parts:
        assert len(schedule.groups) == len(schedule.graph.nodes)
        for group in schedule.groups:
            assert not isinstance(group, AnchorGroup) or not group.epilogue
    fused = compile_function(Block().eval(), *ARGUMENTS)
    assert len(fused.schedule.groups) < len(state.schedule.groups)
    before = [step.name for step in PASSES].index("hoist_parameter_work")
    for step in PASSES[:before]:  # only what shares a kernel is another
        assert step.fusion is None


def test_passes_leave_what_they_take_as_it_is() -> None:
    taken: list[tuple[Pass, Any, str]] = []
    state = compile_function(Block().eval(), *ARGUMENTS)
    again = Compilation(state.captured, Phase("inference"), TARGET, OPTIONS)
    value: Any = state.captured
    for step in passes(OPTIONS):
        taken.append((step, value, step.takes.text(value)))
        value = step.run(value, again)
    for step, before, text in taken:
        assert step.takes.text(before) == text, step.name
    assert step.gives.text(value) == compiler.PLAN.text(state.plan)


def test_the_prepared_part_takes_part_in_every_pass() -> None:
    state = compile_function(Block().eval(), *ARGUMENTS)
    assert state.program.prepared is not None
    assert state.plan.preparation is not None
    assert state.plan.preparation.kernels


def test_an_error_names_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Any, state: Compilation) -> Any:
        return program.map(lambda schedule: Schedule(schedule.graph, schedule.groups[1:]))

    wrong = tuple(replace(s, run=broken) if s.name == "join_pairs" else s for s in PASSES)
    monkeypatch.setattr(compiler, "PASSES", wrong)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="the pass join_pairs"
    ) as info:
        compile_function(lambda x: torch.softmax(x @ x, -1) @ x, torch.randn(8, 8))
    assert isinstance(info.value.inner_exception, VerificationError)


def test_times_and_texts() -> None:
    state = compile_function(Block().eval(), *ARGUMENTS)
    before = ["replace_attention", "replace_calls", "inline_operators", "take_views"]
    before += ["take_forwarded", "take_numbers", "take_seeds", "separate_complex"]
    assert list(state.seconds) == [*before, *(step.name for step in passes(OPTIONS))]
    assert all(seconds >= 0 for seconds in state.seconds.values())
    texts = state.texts()
    expected = {"ir", "hoist_parameter_work", "fuse", "wgsl", "plan"}
    assert expected <= set(texts) <= set(state.seconds)
    assert "find_causal_masks" not in texts  # it has changed nothing
