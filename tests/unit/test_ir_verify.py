"""The verifier names the node that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.compilations import TARGET
from tests.harness import capture, lower_checked
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.graph import LoopGraph, MapGroup, Member, Schedule
from torch_webgpu_compile.ir.nodes import Contraction, Pointwise, Reduction
from torch_webgpu_compile.ir.scalar import Index, Load, const
from torch_webgpu_compile.ir.spaces import Node
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.ir.verify_schedule import verify_schedule
from torch_webgpu_compile.symbolic.sizes import as_expr, iteration


def graph() -> LoopGraph:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).exp()).sum(-1)

    return lower_checked(capture(fn, torch.randn(3, 4)))


def change(number: int, edit: Callable[[Node], Node]) -> LoopGraph:
    good = graph()
    nodes = list(good.nodes)
    nodes[number] = edit(nodes[number])
    return replace(good, nodes=tuple(nodes))


def load(name: str, *index: int, dtype: dtypes.DType = dtypes.float32) -> Load:
    return Load(name, tuple(Index(as_expr(i)) for i in index), dtype)


def edit_pointwise(**changes: object) -> LoopGraph:
    def edit(node: Node) -> Node:
        assert isinstance(node, Pointwise)
        return replace(node, **changes)

    return change(1, edit)


BROKEN: dict[str, tuple[Callable[[], LoopGraph], str]] = {
    "unknown buffer": (lambda: edit_pointwise(body=load("nothing", 0)), "nothing"),
    "rank": (lambda: edit_pointwise(body=load("mm", 0)), "to index mm"),
    "dtype": (lambda: edit_pointwise(body=load("mm", 0, 0, dtype=dtypes.int32)), "loaded as"),
    "body dtype": (lambda: edit_pointwise(body=const(1, dtypes.int32)), "a body of f32"),
    "ranges": (lambda: edit_pointwise(ranges=(as_expr(3),), body=load("mm", 0, 0)), "ranges"),
    "symbols": (
        lambda: edit_pointwise(
            body=Load("mm", (Index(iteration("i7", 3)), Index(as_expr(0))), dtypes.float32)
        ),
        "i7",
    ),
    "order": (lambda: edit_pointwise(body=load("sum_1", 0)), "written before it is read"),
    "written twice": (lambda: edit_pointwise(output="mm"), "written once"),
    "a read of itself": (lambda: edit_pointwise(body=load("exp", 0, 0)), "written before"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_nodes(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(VerificationError, match=message):
        verify_loop_graph(make())


def test_reduction_rules() -> None:
    def edit(node: Node) -> Node:
        assert isinstance(node, Reduction)
        return replace(node, kind="mean")

    with pytest.raises(VerificationError, match=r"sum_1 \(aten.sum.dim_IntList\)"):
        verify_loop_graph(change(2, edit))


def test_contraction_rules() -> None:
    def edit(node: Node) -> Node:
        assert isinstance(node, Contraction)
        return replace(node, index=(node.index[0], node.index[0]))

    with pytest.raises(VerificationError, match="n0 in its output index"):
        verify_loop_graph(change(0, edit))


def test_outputs_must_be_written() -> None:
    good = graph()
    with pytest.raises(VerificationError, match="output 0"):
        verify_loop_graph(replace(good, nodes=good.nodes[:2]))


def test_schedules() -> None:
    two = lower_checked(capture(lambda x: x.exp().exp(), torch.randn(3)))
    first, second = two.nodes
    assert isinstance(first, Pointwise)
    assert isinstance(second, Pointwise)
    at = (iteration("i0", 3),)
    inner = Member(first.output, first.body, at, store=False)
    outer = Member(second.output, second.body, at, store=True)
    verify_schedule(Schedule(two, (MapGroup(first.ranges, (inner, outer)),)), TARGET)
    with pytest.raises(VerificationError, match="group 0 needs exp stored"):
        verify_schedule(Schedule(two, (MapGroup(first.ranges, (outer,)),)), TARGET)
    with pytest.raises(VerificationError, match="output 0"):
        verify_schedule(Schedule(two, (MapGroup(first.ranges, (inner,)),)), TARGET)
