"""A program that is started several times, see `test_precompiled`: compiles, prints what it did."""

from __future__ import annotations

import functools
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_webgpu_compile import counters
from torch_webgpu_compile.callables import stored
from torch_webgpu_compile.device import autoload


class Model(nn.Module):
    """Parameters, a random operator, several results, one of which is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.softmax(self.linear(x), -1)
        return y @ y.t(), y + 0 * torch.rand_like(y)


def on_host(x: torch.Tensor) -> torch.Tensor:
    """Has an operator without kernels."""
    return torch.linalg.eigvalsh(x @ x.t()) + 1


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Reads a number: a plan of two others."""
    return (x * 2) / x.max().item()


def trained(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Has a forward and a backward graph."""
    return torch.tanh(model.linear(x)).square()


def on_device(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Is called with tensors on the device."""
    return torch.relu(x @ weight).cumsum(0)


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """As decorators of models do: asks for something of the function that it wraps."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return OrderedDict({function.__name__: function(*arguments)})

    return call


@named
def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Writes a part of an argument, as a step of a decoder its cache."""
    cache[2:4].copy_(x)
    return cache.sum(0)


def main() -> None:
    if "other-version" in sys.argv:
        stored.sources_digest = lambda: "another"
    if "other-gpu" in sys.argv:
        stored.measured_target = lambda target, options: replace(target, name="another")
    autoload.register()
    torch._dynamo.config.capture_scalar_outputs = True
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(5, 6)
    named_ones = model, on_host, scaled, on_device, step, trained
    functions = {f: torch.compile(f, backend="webgpu") for f in named_ones}
    report = []

    def check(function: Callable[..., Any], *arguments: torch.Tensor, device: str = "cpu") -> None:
        before = counters.plans_compiled
        got = functions[function](*(t.to(device) for t in arguments))
        report.append(min(1, counters.plans_compiled - before))
        moved = torch.utils._pytree.tree_map(torch.Tensor.cpu, got)
        torch.testing.assert_close(moved, function(*arguments), atol=1e-4, rtol=1e-4)

    with torch.no_grad():
        check(model, x)
        check(model, torch.randn(9, 6))
        check(on_host, x)
        check(scaled, x)
        check(on_device, x, torch.randn(6, 3), device="webgpu")
        for device in ("cpu", "webgpu"):
            cache = torch.zeros(5, 6, device=device)
            version = cache._version
            before = counters.plans_compiled
            functions[step](x[:2].to(device), cache)
            report.append(counters.plans_compiled - before)
            assert cache._version == version + 1
            assert torch.equal(cache.cpu()[2:4], x[:2])
    before = counters.plans_compiled
    functions[trained](model, x).sum().backward()
    report.append(min(1, counters.plans_compiled - before))
    got = [parameter.grad for parameter in model.parameters()]
    wanted = torch.autograd.grad(trained(model, x).sum(), list(model.parameters()))
    torch.testing.assert_close(got, list(wanted), atol=1e-4, rtol=1e-4)
    if "save" in sys.argv:
        torch.compiler.save_cache_artifacts()
    print(json.dumps(report))


main()
