"""Models part of which is computed from parameters once, and how they are checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from torch_webgpu_compile import counters


class Mixing(nn.Module):
    """x @ softmax(weight) + scale · bias: the softmax is prepared in a kernel of its own."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))
        self.bias = nn.Parameter(torch.randn(size))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.softmax(self.weight, -1) + self.scale * self.bias


class Convolutions(nn.Module):
    """The second one's weight is prepared in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def dispatches(function: Callable[..., Any], *arguments: Any) -> int:
    before = counters.dispatches
    function(*arguments)
    return counters.dispatches - before


def check(function: Callable[..., Any], model: Callable[..., Any], x: Tensor) -> None:
    """The compiled function against eager PyTorch on the CPU, twice."""
    wanted = copy.deepcopy(model).cpu()(x.cpu()) if isinstance(model, nn.Module) else model(x)
    for _ in range(2):
        assert_close(function(x).cpu(), wanted.cpu(), atol=1e-4, rtol=1e-4)
