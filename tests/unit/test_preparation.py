"""What is computed once for many calls: what qualifies, and what is worth its memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compilations import OPTIONS, TARGET, compile_function
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import Phase
from torch_webgpu_compile.compiler import Compilation, compile_graph, native_operators
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.text import format_graph
from torch_webgpu_compile.ir.verify_schedule import verify_prepared
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import Plan
from torch_webgpu_compile.plan.verify import verify_plan
from torch_webgpu_compile.scheduler.rewrites.preparation import hoist_parameter_work
from torch_webgpu_compile.target import Machine


class Model(nn.Module):
    """A function of itself and its arguments, with a weight and a buffer."""

    def __init__(self, function: Callable[..., Any], size: int = 16) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(size, size))
        self.register_buffer("table", torch.randn(size, size))

    def forward(self, *arguments: Tensor) -> Any:
        return self.function(self, *arguments)


def mixed(m: Model, x: Tensor) -> Tensor:
    return x @ F.softmax(m.weight, -1)


def compiled(function: Callable[..., Any], *arguments: Tensor, **options: Any) -> Compilation:
    return compile_function(Model(function), *(arguments or (torch.randn(3, 16),)), **options)


def prepared(state: Compilation) -> list[str]:
    """The prepared buffers, of which everybody says the same."""
    found = [n for n, b in state.plan.buffers.items() if b.role == "prepared"]
    inner = state.plan.preparation
    assert (inner is None) == (not found)
    if inner is not None:
        assert [o.buffer for o in inner.outputs] == found
        assert all(inner.buffers[n].role == "output" for n in found)
        assert not {n for n, b in inner.buffers.items() if b.role == "input"} - {
            i.buffer for i in state.plan.inputs
        }
    return found


def chain(m: Model, x: Tensor) -> Tensor:
    return x @ (F.softmax(m.weight, -1) @ F.softmax(m.table, 0))


def places(m: Model, x: Tensor) -> Tensor:
    table = torch.softmax(torch.arange(256.0).reshape(16, 16).sin(), -1)
    return (x @ table).cos() @ table


def places_alone() -> Tensor:
    return torch.arange(16.0).sin().exp().tanh().erf()


def solved(m: Model, x: Tensor) -> Tensor:
    """Reads the pivots as places of rows, made of them alone."""
    return torch.linalg.solve_ex(m.weight, x.mT)[0]


# name: (function, prepared buffers)
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "a weight": (mixed, 1),
    "only the last of a chain": (chain, 1),
    "constants": (places, 1),
    "one value": (lambda m, x: torch.zeros(64, 16).index_add(0, x[:, 0].abs().long(), x), 0),
    "two readers": (lambda m, x: (mixed(m, x), mixed(m, x + 1)), 1),
    "a result": (lambda m, x: (x + 1, F.gelu(m.weight).mT), 0),
    "a view of a result": (lambda m, x: (x + 1, m.weight.exp()[1:].mT), 0),
    "a result's maxima and sums": (lambda m, x: (x + 1, F.softmax(m.weight, -1)), 2),
    "an argument": (lambda m, x: F.softmax(x, -1) @ m.weight, 0),
    "both": (lambda m, x: torch.softmax(m.weight * x.sum(), -1), 0),
    "factors and pivots": (solved, 2),
    "one of several results": (lambda m, x: x @ torch.linalg.lu_factor_ex(m.weight)[0], 1),
    "returned pivots": (lambda m, x: (x + 1, *torch.linalg.lu_factor_ex(m.weight)[:2]), 0),
    "random numbers": (lambda m, x: x @ F.softmax(torch.rand(16, 16), -1), 0),
    "a table that one node reads again and again": (lambda m, x: x * places_alone(), 1),
    "what is read as it is": (lambda m, x: x @ m.weight + m.table[0], 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_prepared(name: str) -> None:
    function, count = FUNCTIONS[name]
    assert len(prepared(compiled(function))) == count


def test_a_changed_buffer_is_not_static() -> None:
    def function(m: Model, x: Tensor) -> Tensor:
        result = x @ F.softmax(m.table, -1)
        m.table.mul_(2)
        return result

    assert prepared(compiled(function)) == []


def test_sizes_of_the_call() -> None:
    def function(m: Model, x: Tensor) -> Tensor:
        own = F.softmax(m.weight, -1)
        theirs = F.softmax(m.table * x.shape[0], -1)
        rows = torch.softmax(torch.arange(x.shape[0] * 16).float().reshape(-1, 16).sin(), -1)
        return x @ own @ theirs + (rows @ m.weight).cos() @ m.table

    assert len(prepared(compiled(function, dynamic=True))) == 1


def test_training_prepares_constants_only() -> None:
    states: list[Compilation] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def compile_captured(captured: Any, phase: Phase) -> aot.BoxedFunction:
            states.append(compile_graph(captured, phase, TARGET, OPTIONS, use_cache=False))
            run = torch.fx.Interpreter(captured.module).boxed_run
            return lambda arguments: run(arguments)

        return aot.capture(module, inputs, compile_captured, native_operators())

    model = Model(lambda m, x: mixed(m, x) + places(m, x))
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(3, 16)).sum().backward()
    forward, backward = states
    assert (forward.phase.name, backward.phase.name) == ("forward", "backward")
    assert len(prepared(forward)) == 1
    assert forward.plan.preparation is not None
    assert forward.plan.preparation.inputs == ()
    if backward.plan.preparation is not None:
        assert backward.plan.preparation.inputs == ()


class Weights(nn.Module):
    """Products with softmaxes of weights of several sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(64, n) for n in sizes])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x @ F.softmax(weight, -1) for weight in self.weights]


def nbytes(state: Compilation) -> list[int]:
    """Of the prepared buffers, without the maxima and sums of rows."""
    found = [int(state.plan.buffers[name].nbytes) for name in prepared(state)]
    return [n for n in found if n != 64 * 4]


def test_the_budget() -> None:
    large, middle, small = 8192, 1024, 128
    state = compile_function(Weights(large, middle, small), torch.randn(2, 64))
    # 2 MiB, 256 KiB and 32 KiB: the first one is more than a part of all that a call holds.
    assert nbytes(state) == [64 * middle * 4, 64 * small * 4]
    # As much as the arguments and results take: it may be kept.
    state = compile_function(Weights(large, middle, small), torch.randn(1 << 13, 64))
    assert nbytes(state) == [64 * n * 4 for n in (large, middle, small)]


def test_what_saves_most_per_byte_is_kept() -> None:
    sizes = (2048, 1024, 512, 256)
    state = compile_function(Weights(*sizes), torch.randn(2, 64))
    held = sum(64 * n * 4 for n in sizes)
    kept = nbytes(state)
    assert kept
    assert sum(n for n in kept if n > 1 << 16) <= held / 6
    assert 64 * 2048 * 4 not in kept


def test_what_is_left_out_takes_its_readers_along() -> None:
    """Neither is a large result kept for a small one that needs it, nor is that computed twice."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1024, 1024))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            large = F.softmax(self.weight, -1)
            return x @ large, x + F.softmax(large.sum(0), -1)

    state = compile_function(Model(), torch.randn(2, 1024))
    assert nbytes(state) == [4096, 4096]  # maxima and sums of the rows


def test_a_large_step_to_a_small_result() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1024, 1024))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.softmax((self.weight @ self.weight).sum(0), -1)

    state = compile_function(Model(), torch.randn(2, 1024))
    assert nbytes(state) == [4096]
    assert state.plan.dispatch_count == 1


def test_nothing_of_a_preparation_is_left_in_the_calls() -> None:
    state = compiled(chain)
    inner = state.program.prepared
    assert inner is not None
    outer = state.schedule.graph
    assert set(inner.graph.buffers) & set(outer.buffers) == {
        *(i.buffer for i in inner.graph.inputs),
        *inner.graph.returned,
    }
    assert state.plan.dispatch_count == 1


def test_text_and_json() -> None:
    state = compiled(mixed)
    graph = state.graph
    assert "static=True" in format_graph(graph)
    assert "= prepared()" in format_graph(hoist_parameter_work(graph, TARGET).called)
    plan = state.plan
    assert serialize.from_json(json.loads(json.dumps(serialize.to_json(plan)))) == plan
    other = plan.renamed("other")
    assert other.preparation is not None
    assert (other.name, other.preparation.name) == ("other", "other_preparation")


def test_rules() -> None:
    made = compiled(mixed).program.map(lambda schedule: schedule.graph)
    assert made.prepared is not None
    verify_prepared(made)
    with pytest.raises(VerificationError, match="outputs"):
        verify_prepared(replace(made, prepared=None))
    inputs = tuple(replace(spec, static=False) for spec in made.called.inputs)
    with pytest.raises(VerificationError, match="a static input"):
        verify_prepared(replace(made, called=replace(made.called, inputs=inputs)))


def test_without_a_budget() -> None:
    nothing = Machine(prepared_divisor=1 << 40, small_nbytes=0)
    state = compiled(chain, target=replace(TARGET, machine=nothing))
    assert prepared(state) == []
    assert state.plan.dispatch_count > 1


def _with_outputs(state: Compilation, *names: str) -> Plan:
    """The plan with a preparation that says to make these buffers."""
    plan, inner = state.plan, state.plan.preparation
    assert inner is not None
    by_name = {output.buffer: output for output in inner.outputs}
    outputs = tuple(by_name[name] for name in names)
    return replace(plan, preparation=replace(inner, outputs=outputs))


def test_plans_with_other_prepared_buffers_are_refused() -> None:
    def two(m: Model, x: Tensor) -> Tensor:
        return x @ F.softmax(m.weight, -1) @ m.table.cumsum(0)

    state = compiled(two)
    first, second = prepared(state)
    verify_plan(_with_outputs(state, second, first))  # they are found by their names
    for names in ((first,), (first, first), (first, first, second)):
        with pytest.raises(VerificationError, match=r"its preparation makes|has the role output"):
            verify_plan(_with_outputs(state, *names))
    plan = state.plan
    with pytest.raises(VerificationError, match="nothing prepares"):
        verify_plan(replace(plan, preparation=None))
    buffer = plan.buffers[first]
    for other in (
        replace(buffer, dtype=dtypes.float16),
        replace(buffer, sizes=buffer.sizes[:-1]),
        replace(buffer, strides=buffer.strides[::-1]),
        replace(buffer, nbytes=buffer.nbytes * 2),
        replace(buffer, role="intermediate"),
    ):
        with pytest.raises(VerificationError, match=f"{first}|its preparation makes"):
            verify_plan(replace(plan, buffers={**plan.buffers, first: other}))
    weight = plan.preparation.inputs[0].buffer if plan.preparation else None
    other = replace(plan.buffers[weight or ""], dtype=dtypes.int32)
    with pytest.raises(VerificationError, match="another tensor in the preparation"):
        verify_plan(replace(plan, buffers={**plan.buffers, other.name: other}))


class Quantized(nn.Module):
    """A linear layer of int8, or of eight elements of four bits in an int32, in groups of 32."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        count = 4096 if bits == 8 else 512
        dtype = torch.int8 if bits == 8 else torch.int32
        self.register_buffer("weight", torch.randint(-128, 128, (128, count), dtype=dtype))
        self.register_buffer("scale", torch.rand(128, 128, 1))

    def forward(self, x: Tensor) -> Tensor:
        levels = self.weight
        if levels.dtype is torch.int32:
            shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=x.device)
            levels = (levels[..., None] >> shifts) & 15
        return F.linear(x, (levels.reshape(128, 128, 32).float() * self.scale).flatten(1))


@pytest.mark.parametrize("rows", [1, 4, 4000])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantized_weights_are_not_kept(bits: int, rows: int) -> None:
    """However much memory a call takes; up to 16 rows they are in no memory at all."""
    state = compile_function(Quantized(bits), torch.randn(rows, 4096))
    assert prepared(state) == []
    assert rows > 16 or state.plan.dispatch_count == 1
