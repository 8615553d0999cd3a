"""Random chains of layers whose weights are prepared in other layouts or by computations.

Each of a chain's prepared buffers has its own contents, and many have equal sizes: one in another's
place is a wrong result.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from tests.compiling import compiled
from torch_webgpu_compile import counters
from torch_webgpu_compile.callables.device_graph import DeviceGraph
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.plan import cache as plan_cache

pytestmark = pytest.mark.rotates(12)

CHANNELS = 8
# Of 40, seven like the last five: the plan has its prepared buffers in another order than the
# preparation.
SEEDS = (0, 1, 14, 16, 29, 33)
BOTH = pytest.mark.parametrize("place", ["cpu", "webgpu"])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    plan_cache.clear()
    yield
    torch._dynamo.reset()


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardised in every call."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class Mixed(nn.Module):
    """x mixed over its channels by a function of a weight alone."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS))
        self.bias = nn.Parameter(torch.randn(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        table = self.function(self.weight)
        return torch.einsum("nchw,cd->ndhw", x, table) + self.bias[:, None, None]


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    lambda: Standardized(CHANNELS, CHANNELS, 3, padding=1),
    lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
    lambda: Mixed(lambda w: F.softmax(w, -1)),
    lambda: Mixed(lambda w: w @ w.t() / 8),
    lambda: Mixed(lambda w: w.cumsum(0) / 8),
    lambda: nn.GroupNorm(2, CHANNELS),
    nn.GELU,
)


def chain(seed: int) -> nn.Module:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    drawn = [choose.choice(LAYERS)() for _ in range(choose.randint(3, 7))]
    return nn.Sequential(choose.choice(LAYERS[:2])(), *drawn, choose.choice(LAYERS[4:8])()).eval()


def check(function: Callable[..., Any], model: nn.Module, x: Tensor) -> None:
    assert_close(function(x).cpu(), copy.deepcopy(model).cpu()(x.cpu()), atol=1e-4, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_chains(place: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled, after a change of the weights, with the plan from disk, from a saved program."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
    calls = _notice_calls(monkeypatch)
    model, x = chain(seed).to(place), torch.randn(2, CHANNELS, 9, 9).to(place)
    function = compiled(model)
    check(function, model, x)
    for parameter in model.parameters():
        parameter.mul_(1.25).add_(0.01)
    check(function, model, x)
    plan_cache.clear()
    torch._dynamo.reset()
    hits = counters.plan_cache_hits
    check(compiled(model), model, x)
    assert counters.plan_cache_hits > hits
    graph, arguments = calls[-1]
    assert len(graph.plan.prepared) > 1
    stored = pickle.loads(pickle.dumps(graph))
    check(lambda _: stored(arguments[:])[0], model, x)


def _notice_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list[Any]]]:
    """Fills a list with the graphs that prepare something and the arguments of their calls."""
    calls: list[tuple[Any, list[Any]]] = []

    def noticed(run: Callable[[Any, list[Any]], list[Any]]) -> Any:
        def run_and_note(graph: Any, values: list[Any]) -> list[Any]:
            if graph.plan.preparation is not None:
                calls.append((graph, values[:]))
            return run(graph, values)

        return run_and_note

    for kind in (HostGraph, DeviceGraph):
        monkeypatch.setattr(kind, "run", noticed(kind.run))
    return calls
