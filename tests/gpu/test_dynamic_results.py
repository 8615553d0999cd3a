"""Results whose sizes or places come from data or from sizes that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(2), pytest.mark.usefixtures("fresh")]

Function = Callable[..., Any]


def R(*sizes: int) -> Tensor:
    """Normally distributed numbers: the same for the same sizes."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def _places(x: Tensor) -> Any:
    at = x.relu().nonzero()
    return at, x.masked_select(x > 0) * 2, x[at[:, 0]].sum(0), x[0, 0].nonzero()


def _kinds(x: Tensor) -> Any:
    kinds, of_each, counts = torch.unique((x * 2).long(), return_inverse=True, return_counts=True)
    return kinds * 2, of_each, counts + 1


def _repeated(x: Tensor) -> Any:
    y = x.repeat_interleave(x[:, 0].abs().int(), 0)
    return y * 2, y.sum(0)


@pytest.mark.parametrize("function", [_places, _kinds, _repeated])
def test_sizes_that_come_from_data(function: Function) -> None:
    """They break the graph; what follows is compiled for any size, after two of them."""
    compiled = torch.compile(function, backend="webgpu", dynamic=True)
    counters.reset()
    for k, size in enumerate((30, 9, 70, 41)):
        x = R(size, 3) * 2
        plans = counters.plans_compiled
        torch.testing.assert_close(compiled(x), function(x))
        assert k < 2 or counters.plans_compiled == plans
    assert counters.plans_compiled
    assert not counters.fallbacks


def _rows(x: Tensor) -> Any:
    """No kernels of a plan have it: the device's own operator is called between them."""
    rows = torch.unique(x.round(), dim=0)
    return rows * 2, rows.sum(0)


@pytest.mark.parametrize("function", [_places, _kinds, _repeated, _rows])
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_sizes_that_come_from_data_in_one_graph(function: Function, device: str) -> None:
    """One graph for all of them, and the same plans: the sizes are read between these."""
    compiled = torch.compile(function, backend="webgpu", dynamic=True, fullgraph=True)
    plans = 0
    sizes = (30, 9, 70, 41)
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for k, size in enumerate((*sizes, *sizes)):
            x = R(size, 3) * 2
            got = tree_map(Tensor.cpu, compiled(x.to(device)))
            torch.testing.assert_close(got, function(x))
            assert k <= len(sizes) or counters.plans_compiled == plans  # of each class of sizes
            plans = counters.plans_compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not counters.fallbacks


@pytest.mark.parametrize("most", [48, 700])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.t(),
        lambda x: (x @ x.t()).softmax(-1),
        lambda x: x.t() @ x,
        lambda x: (x.sum(0), x.cumsum(0), x.argmax(0)),
        lambda x: x.t().contiguous().sort(-1).values,
    ],
)
def test_sizes_within_a_range(function: Function, most: int) -> None:
    """What is decided by about how large they are holds for the smallest and the largest."""
    compiled = torch.compile(function, backend="webgpu")
    for size in (5, 2, 12, 47, most):
        x = R(size, 16)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
        # Sums of thousands of rows, in another order.
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("wants_grad", [False, True])
def test_views_of_arguments(offset: int, wants_grad: bool) -> None:
    """Their offsets are symbols: they show the caller's memory, at the right place."""

    def function(x: Tensor) -> Any:
        n = x.shape[0]
        return x[n // 3 :: 2], x[:, n // 2 :].t(), x.exp()

    compiled = torch.compile(function, backend="webgpu", dynamic=True, fullgraph=True)
    for size in (17, 6):
        x = R(size * size + offset)[offset:].reshape(size, size).requires_grad_(wants_grad)
        got, wanted = compiled(x), function(x)
        torch.testing.assert_close(got, wanted)
        for view, other in zip(got[:2], wanted[:2], strict=True):
            assert view.data_ptr() == other.data_ptr()
            assert view.stride() == other.stride()
        if wants_grad:
            (found,) = torch.autograd.grad(got[0].sum() + got[2].sum(), x)
            (right,) = torch.autograd.grad(wanted[0].sum() + wanted[2].sum(), x)
            torch.testing.assert_close(found, right)
