"""Graphs with symbols at known sizes: the same results, no symbols, and windows where needed."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from tests.compilations import TARGET, compile_function
from tests.harness import capture, lower_checked, run_graph, to_tensor
from torch_webgpu_compile import dtypes
from torch_webgpu_compile.compiler import loops_of
from torch_webgpu_compile.ir.at_sizes import at_sizes, has_symbols
from torch_webgpu_compile.ir.nodes import bodies_of
from torch_webgpu_compile.ir.ranges import Decisions
from torch_webgpu_compile.ir.scalar import Load, Masked, Scalar, apply, cast, const, index
from torch_webgpu_compile.ir.text import format_graph
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.symbolic.sizes import as_expr, as_symbol, iteration, symbols_of

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "map": lambda x: x * 2 + x.shape[0],
    "views": lambda x: x.flip(0)[1:].t().reshape(-1, 2)[::3],
    "rows": lambda x: x.softmax(-1).sum(0) / x.shape[1],
    "welford": lambda x: F.layer_norm(x, x.shape[1:]),
    "scan": lambda x: x.cumsum(1),
    "product": lambda x: x @ x.t(),
    "convolution": lambda x: F.conv1d(x[None], x[None, :, :2], padding=1),
    "gather": lambda x: x[x.argmax(0)],
    "scatter": lambda x: x.scatter_add(0, x.argmax(0, keepdim=True), x[:1]),
    "sort": lambda x: x.sort(1),
    "cat": lambda x: torch.cat([x, x[1:]]),
    "triangle": lambda x: x.tril(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.5),
    "sizes": lambda x: (x.shape[0] * 3, x + 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_results(name: str) -> None:
    function = FUNCTIONS[name]
    graph = lower_checked(capture(function, torch.randn(6, 8), dynamic=True))
    assert has_symbols(graph)
    names = {s.name for spec in graph.buffers["in0"].sizes for s in symbols_of(spec)}
    assert len(names) == 2
    for shape in ((6, 8), (12, 10), (4, 6)):
        x = torch.randn(shape)
        first, second = (as_symbol(size) for size in graph.buffers["in0"].sizes)
        assert first is not None
        assert second is not None
        made = at_sizes(graph, dict(zip((first.name, second.name), shape, strict=True)))
        assert not has_symbols(made)
        verify_loop_graph(made)
        wanted = torch.utils._pytree.tree_leaves(function(x))
        for got, value in zip(run_graph(made, [x]), wanted, strict=True):
            if isinstance(value, Tensor):
                assert_close(to_tensor(got, value.dtype), value, atol=1e-5, rtol=1e-5)
            else:
                assert got == value


def test_windows() -> None:
    """A plan with symbols has a binding per buffer, one at sizes has as many as these need."""
    target = replace(TARGET, max_binding_nbytes=1 << 12)
    state = compile_function(lambda x: x * 2, torch.randn(30), dynamic=True, target=target)
    assert [len(step.bindings) for step in state.plan.steps] == [2]
    (symbol,) = symbols_of(state.graph.buffers["in1"].sizes[0])
    loops = loops_of(state)
    assert loops is not None
    for size, bindings in ((30, 2), (1024, 2), (1025, 4), (3000, 6)):
        plan = loops({symbol.name: size})
        assert [len(step.bindings) for step in plan.steps] == [bindings]
        assert [i.buffer for i in plan.inputs] == [i.buffer for i in state.plan.inputs]
    assert loops_of(compile_function(lambda x: x * 2, torch.randn(30), dynamic=False)) is None


def test_a_search_takes_no_steps_that_a_size_decides() -> None:
    graph = lower_checked(capture(lambda x: torch.searchsorted(x, x), torch.randn(6), dynamic=True))
    symbol = as_symbol(graph.buffers["in0"].sizes[0])
    assert symbol is not None
    text = format_graph(at_sizes(graph, {symbol.name: 100_000}))
    assert "i32(1073741824)" in format_graph(graph)
    assert "i32(1073741824)" not in text
    assert "i32(64)" in text


I = index(iteration("i0", 10))  # 0 to 9
X = Load("x", (I,), dtypes.int64)
C = Load("c", (I,), dtypes.bool_)
TRUE, FALSE = const(True, dtypes.bool_), const(False, dtypes.bool_)


def number(value: int) -> Scalar:
    return const(value, dtypes.int64)


DECISIONS: dict[str, tuple[Scalar, Scalar]] = {
    "less": (apply("lt", I, number(10)), TRUE),
    "not less": (apply("lt", I, number(0)), FALSE),
    "open": (apply("lt", I, number(9)), apply("lt", I, number(9))),
    "at most": (apply("le", I, number(9)), TRUE),
    "greater": (apply("gt", number(10), I), TRUE),
    "at least": (apply("ge", I, number(10)), FALSE),
    "equal": (apply("eq", apply("add", I, number(10)), number(9)), FALSE),
    "different": (apply("ne", I, number(-1)), TRUE),
    "sum": (apply("le", apply("add", I, I), number(18)), TRUE),
    "difference": (apply("lt", apply("sub", I, number(10)), number(0)), TRUE),
    "open difference": (
        apply("lt", apply("sub", number(10), I), number(2)),
        apply("lt", apply("sub", number(10), I), number(2)),
    ),
    "data": (apply("lt", X, number(1 << 40)), apply("lt", X, number(1 << 40))),
    "minimum": (apply("minimum", I, number(20)), I),
    "maximum": (apply("maximum", I, number(20)), number(20)),
    "choice": (apply("where", apply("lt", I, number(10)), X, number(1)), X),
    "of a choice": (
        apply("lt", apply("where", C, I, number(12)), number(13)),
        TRUE,
    ),
    "and": (apply("bitwise_and", C, apply("lt", I, number(10))), C),
    "and never": (apply("bitwise_and", apply("lt", I, number(0)), C), FALSE),
    "or": (apply("bitwise_or", C, apply("lt", I, number(10))), TRUE),
    "not": (apply("bitwise_not", apply("lt", I, number(0))), TRUE),
    "masked": (Masked(apply("lt", I, number(10)), X, number(1)), X),
    "masked out": (Masked(apply("lt", I, number(0)), X, number(1)), number(1)),
    "wraps": (
        apply("lt", apply("add", number((1 << 63) - 1), I), number(0)),
        apply("lt", apply("add", number((1 << 63) - 1), I), number(0)),
    ),
    "narrowed": (
        apply("lt", cast(apply("add", I, number(1 << 31)), dtypes.int32), const(0, dtypes.int32)),
        apply("lt", cast(apply("add", I, number(1 << 31)), dtypes.int32), const(0, dtypes.int32)),
    ),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(name: str) -> None:
    given, wanted = DECISIONS[name]
    assert Decisions().simplify(given) is wanted


def test_symbols_have_no_greatest_value() -> None:
    size = as_expr(3) * iteration("i0", 5) + as_expr(2)
    assert Decisions().range_of(index(size)) == (2, 14)
    graph = lower_checked(capture(lambda x: x + 1, torch.randn(6), dynamic=True))
    (extent,) = graph.buffers["in0"].sizes
    assert Decisions().range_of(index(iteration("i0", extent))) is None


def test_graphs_survive_pickling() -> None:
    """Equal expressions are the same object again."""
    state = compile_function(
        lambda x: torch.softmax(x @ x.T + x.shape[0], -1).cumsum(0)[x.shape[0] // 2 :],
        torch.randn(30, 16),
        dynamic=True,
    )
    again = pickle.loads(pickle.dumps(state.graph))
    assert again == state.graph
    assert format_graph(again) == format_graph(state.graph)
    for old, new in zip(state.graph.nodes, again.nodes, strict=True):
        assert bodies_of(old) == bodies_of(new)
    for name, buffer in again.buffers.items():
        assert buffer.dtype is state.graph.buffers[name].dtype
        assert all(map(operator.is_, buffer.sizes, state.graph.buffers[name].sizes))
