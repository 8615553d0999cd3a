"""Drivers that end loops after so many iterations of an invocation: no kernel has more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compilations import TARGET, compile_function
from tests.harness import capture, check_strides, compare, lower_checked, run_graph
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.ir.nodes import Contraction, Reduction
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.plan.model import Dispatch, Plan
from torch_webgpu_compile.plan.serialize import from_json, to_json
from torch_webgpu_compile.scheduler.rewrites.inline import inline_producers
from torch_webgpu_compile.scheduler.rewrites.split import split_long_contractions, split_reductions
from torch_webgpu_compile.symbolic.sizes import evaluate, product

LIMIT = 64
LIMITED = replace(TARGET, max_loop_iterations=LIMIT)

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(0),
    "row": lambda x: x.t().contiguous().amax(1),
    "all": lambda x: x.prod(),
    "any": lambda x: (x > 2).any(0),
    "argmax": lambda x: x.argmax(0),
    "argmin": lambda x: x.round().argmin(0),
    "argmax of all": lambda x: x.round().argmax(),
    "max": lambda x: x.max(0),
    "softmax": lambda x: x.softmax(0),
    "var": lambda x: x.var(0),
    "product": lambda x: x.t() @ x,
    "products": lambda x: torch.bmm(x.t()[None].expand(2, -1, -1), torch.stack([x, x * 2])),
    "convolution": lambda x: torch.conv1d(x.t()[None], x.t()[None, :, :-2]),
    "cumsum": lambda x: x.cumsum(0),
}


def sample() -> Tensor:
    return torch.randn(1001, 3, generator=torch.Generator().manual_seed(0))


def weighted(x: Tensor) -> Tensor:
    """NaN, and equal extremes."""
    x = x.clone()
    x[[500, 700], 1] = float("nan")
    x[[300, 900], 2] = 9
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_divided_is_the_same(name: str) -> None:
    function = FUNCTIONS[name]
    x = weighted(sample()) if name.startswith(("arg", "max")) else sample() * 0.1
    captured = capture(function, x)
    graph = lower_checked(captured, target=LIMITED)
    divided = split_reductions(split_long_contractions(graph, LIMITED), LIMITED)
    verify_loop_graph(divided)
    inner = [int(product(n.inner)) for n in divided.nodes if isinstance(n, Contraction)]
    assert max(inner, default=0) <= 2 * LIMIT
    if name not in ("row", "all", "argmax of all"):  # of 1024 elements in an iteration
        columns = [int(product(n.reduce_ranges)) for n in divided.nodes if isinstance(n, Reduction)]
        assert max(columns, default=0) <= LIMIT
    actual = run_graph(divided, [x])
    check_strides(captured, actual)
    compare(actual, torch.utils._pytree.tree_leaves(function(x)), atol=1e-3, rtol=1e-3)


def loops(plan: Plan, **sizes: int) -> list[int]:
    steps = [step for step in plan.steps if isinstance(step, Dispatch)]
    return [evaluate(step.iterations, sizes) for step in steps]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_kernel_has_more_iterations(name: str) -> None:
    x = torch.randn(50_000, 3)
    limited = replace(TARGET, max_loop_iterations=1000)
    plan = compile_function(FUNCTIONS[name], x, target=limited).plan
    assert any(loops(plan))
    assert max(loops(plan)) <= 1000
    free = compile_function(FUNCTIONS[name], x).plan
    assert not any(loops(free))
    assert free.dispatch_count <= plan.dispatch_count
    assert from_json(to_json(plan)) == plan


def test_iterations_of_symbolic_sizes_are_known_with_them() -> None:
    plan = compile_function(
        lambda x: x.sum(0), torch.randn(50, 3), target=LIMITED, dynamic=True
    ).plan
    symbols = [s for b in plan.buffers.values() for s in map(str, b.sizes) if s.startswith("s")]
    few = loops(plan, **dict.fromkeys(symbols, 10))
    many = loops(plan, **dict.fromkeys(symbols, 100_000))
    assert 0 < max(few) < 20
    assert max(many) > 700


def test_what_cannot_be_divided_is_refused() -> None:
    def attention(x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as info:
        compile_function(attention, torch.randn(1, 1, 4096, 16), target=LIMITED)
    error = info.value.inner_exception
    assert isinstance(error, UnsupportedOp)
    assert "loops" in str(error)


@pytest.mark.parametrize("dims", [(1, 2), (0, 1)])
def test_a_position_in_parts_of_several_dimensions(dims: tuple[int, int]) -> None:
    x = torch.zeros(3, 40, 50)
    x[1, 7, 3] = x[1, 7, 4] = x[1, 39, 49] = 1
    x[2, 39, 49] = 1
    limited = replace(TARGET, max_loop_iterations=8)

    def function(x: Tensor) -> Tensor:
        return x.flatten(*dims).argmax(dims[0])

    graph = split_reductions(lower_checked(capture(function, x), target=limited), limited)
    verify_loop_graph(graph)
    assert sum(isinstance(node, Reduction) for node in graph.nodes) == 2
    compare(run_graph(graph, [x]), [function(x)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.special.gammainc(x.abs() + 1, x.abs()).sum(0),
        lambda x: (x.long() ** x.long().abs()).sum(0),
        lambda x: torch.special.legendre_polynomial_p(x, 5).amax(0),
        lambda x: torch.special.gammainc((x @ x.t()).abs() + 1, torch.tensor(2.0)),
    ],
)
def test_functions_that_are_loops_are_not_in_loops(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(70, 9)
    target = replace(TARGET, max_loop_iterations=65535)
    limited = compile_function(function, x, target=target).plan
    free = compile_function(function, x).plan
    assert limited.dispatch_count == free.dispatch_count + 1


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (lambda x: x.softmax(-1), 3),
        (lambda x: x.log_softmax(-1), 3),
        (lambda x: x.logsumexp(-1), 2),
        (lambda x: x.argmax(-1), 2),
    ],
)
def test_parts_of_long_rows_do_not_wait_for_each_other(
    function: Callable[[Tensor], Tensor], kernels: int
) -> None:
    """Also where a part has no numbers but infinities."""
    numbers = torch.randn(4, 140_001, generator=torch.Generator().manual_seed(0))
    numbers[0, :90_000] = -torch.inf
    numbers[1, 77_777] = torch.inf
    numbers[2, 77_777] = torch.nan
    for x in (numbers, torch.full_like(numbers, -torch.inf)):
        graph = lower_checked(capture(function, x), target=TARGET)
        divided = split_reductions(inline_producers(graph, TARGET), TARGET)
        verify_loop_graph(divided)
        compare(run_graph(divided, [x]), [function(x)])
    assert compile_function(function, numbers).plan.dispatch_count == kernels
