"""Indices from data are checked: in the interpreter, in kernels' text, in plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compilations import TARGET, compile_function
from tests.harness import capture, lower_checked, run_graph
from tests.index_calls import CALLS, Call, numbers
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.errors import IndexCheck, IndexOutOfRangeError
from torch_webgpu_compile.ir.nodes import bodies_of
from torch_webgpu_compile.ir.scalar import checks_of
from torch_webgpu_compile.ir.text import format_graph
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import STATUS, Dispatch

PROVEN = {
    "constant": lambda x, i: x[torch.tensor([1, 2]).new_zeros(2)],
    "arange": lambda x, i: x[torch.arange(4)],
    "arange from the end": lambda x, i: x.index_select(0, 4 - torch.arange(4)),
    "clamped": lambda x, i: x.index_select(0, i.clamp(0, 4)),
    "remainder": lambda x, i: x.index_select(0, i % 5),
    "bits": lambda x, i: x.index_select(0, i & 3),
    "chosen": lambda x, i: x.index_select(0, torch.where(i > 2, 1, 4)),
    "position of the largest": lambda x, i: x.index_select(0, x.argmax(0)),
    "bool": lambda x, i: x.index_select(0, (i > 2).int()),
    "scatter": lambda x, i: x.index_copy(0, i.clamp(0, 4), x[:3]),
}
UNPROVEN = {
    "clamped on one side": lambda x, i: x.index_select(0, i.clamp(min=0)),
    "clamped too high": lambda x, i: x.index_select(0, i.clamp(0, 5)),
    "remainder too high": lambda x, i: x.index_select(0, i % 6),
    "fmod": lambda x, i: x.index_select(0, torch.fmod(i, 5)),
    "arange too far": lambda x, i: x.index_select(0, torch.arange(6)),
    "position in all": lambda x, i: x.index_select(0, x.argmax().reshape(1)),
    "narrowed": lambda x, i: x.index_select(0, (i & 3).int() - 1),
}


def lowered(function, *args, **options):
    return lower_checked(capture(function, *args, **options))


def checks_in(graph):
    return [c for node in graph.nodes for body in bodies_of(node) for c in checks_of(body)]


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_interpreter_raises(call: Call) -> None:
    x = numbers()
    graph = compile_function(call.run, x, call.good()).graph
    is_number = [graph.buffers[i.buffer or ""].dtype is dtypes.float32 for i in graph.inputs]

    def interpreted(index: torch.Tensor) -> Any:
        return run_graph(graph, [x if number else index for number in is_number])

    torch.testing.assert_close(interpreted(call.good()), [call.run(x, call.good())])
    for value in call.wrong:
        with pytest.raises(IndexOutOfRangeError) as found:
            interpreted(call.bad(value))
        assert (found.value.index, found.value.size) == (value, call.size)
        assert found.value.dim == call.dim
        assert isinstance(found.value, (IndexError, RuntimeError))


@pytest.mark.parametrize("function", PROVEN.values(), ids=PROVEN)
def test_what_is_in_range_is_not_checked(function) -> None:
    assert not checks_in(lowered(function, numbers(), torch.tensor([0, 3, 4])))


@pytest.mark.parametrize("function", UNPROVEN.values(), ids=UNPROVEN)
def test_what_may_be_out_of_range_is_checked(function) -> None:
    assert checks_in(lowered(function, numbers(), torch.tensor([0, 3, 4])))


def test_masked_out_indices_are_not_wrong() -> None:
    def function(x, i):
        safe = torch.where(i >= 0, i, 0)
        return torch.where(i >= 0, x[safe, 0], 0.0)

    x, i = numbers(), torch.tensor([0, -100, 4])
    (actual,) = run_graph(lowered(function, x, i), [x, i])
    torch.testing.assert_close(actual, function(x, i))


def test_symbolic_sizes_are_what_is_checked_against() -> None:
    def function(x, i):
        return x.index_select(0, i) * 2

    graph = lowered(function, numbers(), torch.tensor([0, 3, 4]), dynamic=True)
    (check,) = checks_in(graph)
    assert not check.size.expr.is_constant
    with pytest.raises(IndexOutOfRangeError, match=r"index 5 .* size 5"):
        run_graph(graph, [numbers(), torch.tensor([0, 5])])


def test_the_text_of_a_graph_keeps_checks() -> None:
    call = CALLS["index"]
    graph = lowered(call.run, numbers(), call.good())
    text = format_graph(graph)
    for found in checks_in(graph):
        check = found.check
        assert f", {check.op!r}, {check.dim}, {check.source!r})" in text


def test_a_plan_says_what_its_kernels_check() -> None:
    plan = compile_function(
        lambda x, i: x.index_select(0, i) + x[i], numbers(), CALLS["index"].good()
    ).plan
    (step,) = [step for step in plan.steps if isinstance(step, Dispatch)]
    assert {c.op for c in step.checks} == {"aten.index_select.default", "aten.index.Tensor"}
    assert {c.dim for c in step.checks} == {0}
    assert plan.buffers[STATUS].role == "status"
    assert step.bindings[-1].buffer == STATUS
    assert plan.kernels[step.kernel].bindings[-1].writable
    again = serialize.from_json(json.loads(json.dumps(serialize.to_json(plan))))
    assert again == plan


def test_an_index_is_checked_once_for_all_its_uses() -> None:
    def function(x, i):
        chosen = x[i]
        return chosen.exp() * chosen + chosen.abs()

    (kernel,) = compile_function(function, numbers(), CALLS["index"].good()).plan.kernels
    assert kernel.wgsl.count("tw_report(") == 2  # the function and one call


def test_plans_without_checks_do_not_know_of_them() -> None:
    plan = compile_function(
        lambda x, i: x[torch.arange(3)] + i[:, None], numbers(), torch.arange(3)
    ).plan
    assert STATUS not in plan.buffers
    assert all("tw_report" not in kernel.wgsl for kernel in plan.kernels)
    assert all(not s.checks for s in plan.steps if isinstance(s, Dispatch))


@pytest.mark.parametrize("most", [8, 12])
def test_the_status_fits_beside_the_buffers(most: int) -> None:
    def function(x, i, *others):
        result = x[i]
        for other in others:
            result = result + other
        return result

    others = [torch.randn(3, 4) for _ in range(11)]
    target = replace(TARGET, max_storage_buffers=most)
    plan = compile_function(function, numbers(), CALLS["index"].good(), *others, target=target).plan
    assert max(len(kernel.bindings) for kernel in plan.kernels) <= most


def test_the_message_names_operator_index_and_size() -> None:
    error = IndexCheck("aten.gather.default", "model.py:3: x.gather(0, i)", 1).error(7, 5)
    assert "aten.gather.default: index 7 is out of bounds for dimension 1 with size 5" in str(error)
    assert "model.py:3" in str(error)
    assert "4 elements" in str(IndexCheck("aten.take.default").error(-9, 4))
