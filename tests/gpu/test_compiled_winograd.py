"""Winograd's convolutions on the adapter, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from torch_webgpu_compile import counters, plan_cache
from torch_webgpu_compile.scheduler import winograd


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even where it does not pay."""
    monkeypatch.setattr(winograd, "ENABLED", True)
    monkeypatch.setattr(winograd, "_pays", lambda *_: True)
    monkeypatch.setattr(winograd, "_PART_OF_A_CALL", 1e-9)
    plan_cache.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    plan_cache.clear()
    torch._dynamo.reset()


def dispatches(function: Callable[..., Any], *arguments: Any) -> int:
    before = counters.dispatches
    function(*arguments)
    return counters.dispatches - before


def check(model: nn.Module, x: Tensor, least: int = 3, **tolerance: float) -> Callable[..., Any]:
    """The model against eager; it takes at least so many dispatches."""
    function = torch.compile(model, backend="webgpu", fullgraph=True)
    with torch.no_grad():
        got, wanted = function(x), model(x)
        assert_close(got, wanted, **tolerance)
        assert got.stride() == wanted.stride()
        assert dispatches(function, x) >= least
    return function


def convolution(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, **options).eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 9), (3, 4), (13, 6)])
def test_sizes(batch: int, padding: int, height: int, width: int) -> None:
    x = torch.randn(batch, 8, height, width).to(memory_format=torch.channels_last)
    check(convolution(8, 12, padding=padding), x)


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 8), (8, 6), (5, 7), (1, 4)])
def test_channels_that_are_no_vectors(inputs: int, outputs: int) -> None:
    x = torch.randn(2, inputs, 9, 8).to(memory_format=torch.channels_last)
    check(convolution(inputs, outputs, padding=1), x, least=1)


class Residual(nn.Module):
    """Two convolutions with all that may follow them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = convolution(channels, channels, padding=1, bias=False)
        self.second = convolution(channels, channels, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(hidden)) + x)


@pytest.mark.parametrize("size", [8, 11])
def test_what_follows(size: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), Residual(16), nn.Conv2d(16, 4, 1)).eval()
    x = torch.randn(2, 3, size, size)
    function = check(model, x)
    with torch.no_grad():
        model[1].first.weight.mul_(-2)
        assert_close(function(x), model(x))
        other = copy.deepcopy(model)
        model.load_state_dict(_changed(other))
        assert_close(function(x), model(x))


def _changed(model: nn.Module) -> dict[str, Tensor]:
    """Other numbers of the same sizes."""
    return {
        name: value + 0.1 * torch.rand_like(value) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }


def test_accuracy() -> None:
    """Sums of many products stay as close to exact ones as PyTorch's tolerances for float32."""
    model = convolution(256, 64, padding=1, bias=False)
    x = torch.randn(1, 256, 14, 14).to(memory_format=torch.channels_last)
    function = check(model, x)
    with torch.no_grad():
        exact = F.conv2d(x.double(), model.weight.double(), padding=1)
        assert_close(function(x).double(), exact, rtol=1.3e-6, atol=1e-5)


def test_sizes_that_change() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), convolution(8, 8, padding=1), nn.ReLU()).eval()
    function = torch.compile(model, backend="webgpu", dynamic=True)
    with torch.no_grad():
        for batch, size in ((1, 8), (2, 9), (3, 12)):
            x = torch.randn(batch, 4, size, size)
            assert_close(function(x), model(x))
