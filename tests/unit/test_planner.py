"""Placement of intermediates and deduplication of kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compilations import compile_function
from tests.unit.test_serialize import make_composed
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan.model import (
    Check,
    Dispatch,
    HostStep,
    Loop,
    PlanBuffer,
    PlanOutput,
    ReadNumber,
    Run,
)
from torch_webgpu_compile.plan.numbers import HostNumber, python_number
from torch_webgpu_compile.plan.verify import verify_plan
from torch_webgpu_compile.planner.build import Interval, assign_slots
from torch_webgpu_compile.symbolic.sizes import ZERO, as_expr, symbol

SETTINGS = settings(deadline=None, max_examples=300, derandomize=True, database=None)
SYMBOLIC = [symbol("s", 2) * 4, symbol("s", 2) * 8, symbol("t", 2) * 4]


@st.composite
def intervals(draw):
    found = []
    for k in range(draw(st.integers(0, 14))):
        first = draw(st.integers(0, 12))
        last = first + draw(st.integers(0, 6))
        constant = st.integers(0, 4096).map(as_expr)
        nbytes = draw(st.one_of(constant, st.sampled_from(SYMBOLIC)))
        found.append(Interval(f"b{k}", nbytes, first, last))
    return found


@SETTINGS
@given(intervals())
def test_slots_never_overlap(found):
    slots = assign_slots(found)
    assert set(slots) == {i.name for i in found}
    for a in found:
        for b in found:
            if a.name < b.name and slots[a.name] == slots[b.name]:
                assert a.last < b.first or b.last < a.first, (a, b)


@SETTINGS
@given(intervals())
def test_a_symbolic_slot_holds_one_size(found):
    slots = assign_slots(found)
    for a in found:
        for b in found:
            if slots[a.name] == slots[b.name] and not a.nbytes.is_constant:
                assert a.nbytes is b.nbytes


def peak_nbytes(intervals):
    """The largest sum of live buffers over all steps: the lower bound for any placement."""
    return max(
        (
            sum(i.nbytes.constant for i in intervals if i.first <= step <= i.last)
            for step in {i.first for i in intervals}
        ),
        default=0,
    )


@SETTINGS
@given(intervals())
def test_memory_is_between_the_peak_and_the_sum(found):
    fixed = [i for i in found if i.nbytes.is_constant]
    slots = assign_slots(fixed)
    size: dict[int, int] = {}
    for i in fixed:
        size[slots[i.name]] = max(size.get(slots[i.name], 0), i.nbytes.constant)
    total = sum(size.values())
    assert peak_nbytes(fixed) <= total <= sum(i.nbytes.constant for i in fixed)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.relu(x @ w)
    return x


def test_repeated_layers_share_kernels_and_memory():
    plan = compile_function(chain, torch.randn(32, 16), torch.randn(16, 16)).plan
    assert plan.dispatch_count == 6
    assert len(plan.kernels) == 1
    slots = {b.slot for b in plan.buffers.values() if b.slot is not None}
    assert len(slots) == 2


def test_kernel_names_are_unique():
    def function(x):
        return torch.softmax(x, 0), torch.softmax(x, 1), x.sum(0), x.sum(1)

    plan = compile_function(function, torch.randn(32, 16)).plan
    names = [kernel.name for kernel in plan.kernels]
    assert len(set(names)) == len(names)


def test_live_buffers_of_a_plan_do_not_share_slots():
    def function(x, w):
        a = x @ w
        b = torch.softmax(a, -1) @ w
        c = (a + b) @ w
        return (c * a).sum(0)

    plan = compile_function(function, torch.randn(32, 16), torch.randn(16, 16)).plan
    used: dict[str, list[int]] = {}
    for k, step in enumerate(plan.steps):
        assert isinstance(step, Dispatch)
        for binding in step.bindings:
            used.setdefault(binding.buffer, []).append(k)
    placed = {n: (min(at), max(at)) for n, at in used.items() if plan.buffers[n].slot is not None}
    for a, (first, last) in placed.items():
        for b, (start, end) in placed.items():
            if a < b and plan.buffers[a].slot == plan.buffers[b].slot:
                assert last < start or end < first, (a, b)


def solved(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(torch.tensor([[2.0, 1.0], [1.0, 3.0]])) * x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"constants": {}}, "constants do not fit"),
        (lambda p: {"constants": {"const": b"1234"}}, "has 4 bytes, its buffer 16"),
        (lambda p: {"buffers": without(p.buffers, "const"), "constants": {}}, "no buffer const"),
        (lambda p: {"steps": (replace(p.steps[0], outputs=("other",)),)}, "no buffer other"),
        (lambda p: {"steps": (replace(p.steps[0], outputs=("const",)),)}, "const is written"),
        (lambda p: {"inputs": ()}, "inputs .*in0.* do not fit"),
    ],
)
def test_a_plan_with_steps_on_what_it_does_not_have_is_refused(change, message):
    plan = compile_function(solved, torch.randn(2), options=CompileOptions(fallback="silent")).plan
    assert isinstance(plan.steps[0], HostStep)
    verify_plan(plan)
    with pytest.raises(VerificationError, match=message):
        verify_plan(replace(plan, **change(plan)))


def without(buffers: dict[str, PlanBuffer], name: str) -> dict[str, PlanBuffer]:
    return {key: buffer for key, buffer in buffers.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": (Run(2, ("x",), ("a",)),)}, "no plan 2"),
        ({"steps": (Run(0, (), ("a",)),)}, "other arguments or results"),
        ({"steps": (Run(0, ("y",), ("a",)),)}, r"\['y'\] is used before"),
        ({"steps": (Run(0, ("s0",), ("a",)),)}, "s0 of another kind"),
        ({"steps": (Run(0, ("x",), ("x",)),)}, "two values are named x"),
        ({"steps": (ReadNumber("s0", "n"),)}, "s0 is no tensor"),
        ({"steps": (Check("n", ""),)}, r"\['n'\] is used before"),
        ({"steps": (Dispatch(0, (), (ZERO,) * 3, (), ZERO, ZERO, ZERO),)}, "has a dispatch"),
        ({"steps": (Loop(0, None, None, ("x",), (), ("a",)),)}, "endless"),
        ({"steps": (Loop(0, 0, None, ("s0",), (), ("a",)),)}, "s0 of another kind"),
        ({"steps": (Loop(0, 0, None, ("x",), (), ("a",), (1,)),)}, "stacks what is none"),
        ({"outputs": (PlanOutput("y"),)}, r"\['y'\] is used before"),
        ({"outputs": (PlanOutput("s0", mutates=0),)}, "it changes argument 0"),
        ({"outputs": (PlanOutput("x", (as_expr(1),)),)}, "lays out a result"),
        ({"plans": (make_composed(), replace(make_composed(), name=""))}, "the name ''"),
    ],
)
def test_a_composed_plan_of_what_is_not_there_is_refused(change, message):
    plan = make_composed()
    verify_plan(plan)
    kept = () if "steps" in change else plan.outputs
    with pytest.raises(VerificationError, match=message):
        verify_plan(replace(plan, **{"outputs": kept, **change}))


@pytest.mark.parametrize(
    ("op", "args", "value"),
    [
        ("trunc", (HostNumber("mul", (0.3, symbol("n"))),), 2),
        ("floordiv", (HostNumber("neg", (symbol("n"),)), as_expr(2)), -4),
        ("round", (HostNumber("div", (symbol("n"), as_expr(2))),), 4),
        ("where", (HostNumber("lt", (symbol("n"), as_expr(9))), 1.5, as_expr(3)), 1.5),
        ("pow", (as_expr(2), as_expr(70)), 2.0**70),
    ],
)
def test_numbers_in_python_s_arithmetic(op, args, value):
    found = python_number(HostNumber(op, args), {"n": 7})
    assert (type(found), found) == (type(value), value)


def test_numbers_are_bounded():
    with pytest.raises(OverflowError):
        python_number(HostNumber("pow", (as_expr(1 << 40), as_expr(2))), {})
