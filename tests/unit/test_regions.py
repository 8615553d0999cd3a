"""Repeated regions: PyTorch looks into each once, however often it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import CapturedGraph, Phase

Operator = type(torch.ops.higher_order.invoke_subgraph)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Any:
        return x + self.linear(x).relu()


def as_it_is(captured: CapturedGraph, phase: Phase) -> Callable[[list[Any]], Sequence[Any]]:
    def run(arguments: list[Any]) -> Sequence[Any]:
        values = list(arguments)
        arguments.clear()
        results = list(captured.module(*values))
        for output, argument in phase.forwarded:
            results[output] = values[argument]
        return results

    return run


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return aot.capture(module, inputs, as_it_is, (), aot.Hooks(on_host=lambda *_: None))


def schemas_of_a_step(layers: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The regions that a training step of equal layers makes schemas of; checks its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(layers)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    made: list[str] = []
    original = Operator.gen_schema

    def counted(self: Any, subgraph: Any, identifier: str, *operands: Any) -> Any:
        made.append(identifier)
        return original(self, subgraph, identifier, *operands)

    x = torch.randn(2, 4, requires_grad=True)  # as what the other layers are given
    with monkeypatch.context() as patch:
        patch.setattr(Operator, "gen_schema", counted)
        torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()])
    return made


def test_schemas_are_made_for_regions_not_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Operator.gen_schema
    made = schemas_of_a_step(5, monkeypatch)
    assert made
    assert len(made) == len(set(made)) == len(schemas_of_a_step(3, monkeypatch))
    assert Operator.gen_schema is original
