"""A plan is found by Dynamo's graph, and then serves as the one that was made by tracing it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.device.autoload import register
from torch_webgpu_compile.plan import cache as plan_cache


class Block(nn.Module):
    """Parameters, a buffer that changes, a mask made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        mask = torch.ones_like(x).tril()
        return self.norm(nn.functional.gelu(self.linear(x))) * mask + self.steps


def several(x: Tensor) -> Any:
    y = x.view(4, 3, 2).transpose(1, 2).contiguous()
    return {"a": y.softmax(-1), "b": [y, 3]}, y.argmax(-1)


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.round() @ torch.ones(6, 2)).float()


def changed(x: Tensor) -> Tensor:
    x.mul_(2)
    x[0] = 1
    return x.sum(1) + 1


@torch.compiler.allow_in_graph
def of_user(x: Tensor) -> Tensor:
    return x * 3


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin() + 1, x, use_reentrant=False)


FOUND: list[Callable[..., Any]] = [
    several,
    with_autocast,
    changed,
    lambda x: (x + 1, None, x.exp()),
]
TRACED: list[Callable[..., Any]] = [
    lambda x: (x[1:], x + 1),
    lambda x: nn.functional.dropout(x) > 9,
    lambda x: of_user(x) + 1,
    checkpointed,
]


@pytest.fixture
def again(tmp_path, monkeypatch):
    """Compiles a function as a process would that is started again; counts what it traces."""
    traced = []

    def counting(module: Any, *arguments: Any, **keywords: Any) -> Any:
        traced.append(module)
        return original(module, *arguments, **keywords)

    original = aot.aot_module_simplified
    monkeypatch.setattr(aot, "aot_module_simplified", counting)
    options = {"cache": str(tmp_path / "cache"), "fallback": "silent"}

    def compiled(function: Any, **keywords: Any) -> tuple[Any, list[Any]]:
        torch._dynamo.reset()
        plan_cache.clear()
        traced.clear()
        return torch.compile(function, backend="webgpu", options=options, **keywords), traced

    yield compiled
    plan_cache.clear()


def check(function: Any, reference: Any, x: Tensor) -> None:
    given, expected = x.clone(), x.clone()
    torch.testing.assert_close(function(given), reference(expected), equal_nan=True)
    torch.testing.assert_close(given, expected, equal_nan=True)


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_functions(number, is_found, again):
    function = (FOUND if is_found else TRACED)[number]
    check(again(function)[0], function, torch.randn(4, 6))
    compiled, traced = again(function)
    check(compiled, function, torch.randn(4, 6))
    assert bool(traced) is not is_found
    check(compiled, function, torch.full((4, 6), float("nan")))
    check(compiled, function, torch.randn(6, 4).T)  # another graph, as ever


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_a_module(device, again):
    if device == "webgpu":
        register()
    module = Block().to(device)
    first = deepcopy(module)
    with torch.no_grad():
        again(first)[0](torch.randn(5, 6, device=device))
        compiled, traced = again(module)
        other = deepcopy(module)
        for _ in range(3):
            x = torch.randn(5, 6, device=device)
            torch.testing.assert_close(compiled(x), other(x))
    assert not traced
    for mine, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    nn.init.ones_(module.linear.weight)
    nn.init.ones_(other.linear.weight)
    with torch.no_grad():
        x = torch.randn(5, 6, device=device)
        torch.testing.assert_close(compiled(x), other(x))


def test_gradients_are_traced(again):
    x = torch.randn(4, 6)
    with torch.no_grad():
        again(torch.sin)[0](x)
    compiled, traced = again(torch.sin)
    leaf = x.clone().requires_grad_()
    compiled(leaf).sum().backward()
    assert traced
    torch.testing.assert_close(leaf.grad, x.cos())


def test_sizes_that_change_are_traced(again):
    def function(x: Tensor) -> Tensor:
        return x * x.shape[0]

    for _ in range(2):
        compiled, traced = again(function, dynamic=True)
        check(compiled, function, torch.randn(4, 6))
        check(compiled, function, torch.randn(5, 6))
        assert len(traced) == 1


@pytest.mark.parametrize("damage", ["way", "plan"])
def test_a_damaged_entry_is_made_again(damage, again, tmp_path):
    check(again(torch.sin)[0], torch.sin, torch.randn(4, 6))
    for path in (tmp_path / "cache").glob("*.dynamo" if damage == "way" else "*.plan"):
        path.write_bytes(path.read_bytes()[:-1])
    for has_traced in (True, False):
        compiled, traced = again(torch.sin)
        check(compiled, torch.sin, torch.randn(4, 6))
        assert bool(traced) is has_traced
