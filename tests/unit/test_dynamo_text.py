"""The key of a graph of Dynamo's: what decides what becomes of it is in it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_webgpu_compile.capture.graph.dynamo_text import dynamo_text


def text_of(function: Any, *arguments: Any, around: Any = None, **keywords: Any) -> str | None:
    found = []

    def backend(module: Any, inputs: Any) -> Any:
        found.append(dynamo_text(module, inputs))
        return module.forward

    torch._dynamo.reset()
    with around or nullcontext():
        torch.compile(function, backend=backend, **keywords)(*arguments)
    assert len(found) == 1
    return found[0]


def function(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.linear(x, y).mul(2.0).softmax(-1)


def other_operator(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.linear(x, y).mul(2.0).log_softmax(-1)


def other_number(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.linear(x, y).mul(2).softmax(-1)


X, Y = torch.randn(2, 3), torch.randn(4, 3)
SHARED = torch.randn(6, 3)
OTHERS: dict[str, tuple[Any, ...]] = {
    "operator": (other_operator, X, Y),
    "number": (other_number, X, Y),
    "dtype": (function, X.half(), Y.half()),
    "strides": (function, X.T.contiguous().T, Y),
    "sizes": (function, X[:1], Y),
    "gradients": (function, X, Y.clone().requires_grad_()),
    "parameter": (function, X, nn.Parameter(Y, requires_grad=False)),
    "memory": (function, SHARED[:2], SHARED[2:]),
}
STATES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in half": lambda: torch.autocast("cpu", torch.float16),
}


def test_what_decides_is_in_the_text() -> None:
    texts = [text_of(function, X, Y), *(text_of(*other) for other in OTHERS.values())]
    texts += [text_of(function, X, Y, around=state()) for state in STATES.values()]
    torch.set_default_dtype(torch.float64)
    try:
        texts.append(text_of(function, X, Y))
    finally:
        torch.set_default_dtype(torch.float32)
    assert None not in texts
    assert len(set(texts)) == len(texts)


def test_other_values_have_the_same_text() -> None:
    assert text_of(function, X, Y) == text_of(function, torch.ones(2, 3), Y + 1)


class Chosen(nn.Module):
    """Weights by names, as those of adapters."""

    def __init__(self, active: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(4, 3) for name in "ab"})
        self.active, self.other = active, "b" if active == "a" else "a"

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[self.active].T - x @ self.weights[self.other].T


def test_names_of_arguments_are_not_in_the_text() -> None:
    assert text_of(Chosen("a"), X) == text_of(Chosen("b"), X)
    # But which of them is where.
    first, second = (lambda x, y: x.sin() * (x - y)), (lambda x, y: x.sin() * (y - x))
    assert text_of(first, X, X + 1) != text_of(second, X, X + 1)


@torch.compiler.allow_in_graph
def of_user(x: Tensor) -> Tensor:
    return x + 1


def replaced(x: Tensor) -> Tensor:
    return nn.functional.relu6(x)


@pytest.mark.parametrize(
    ("written", "argument", "dynamic"),
    [
        (lambda x: of_user(x) * 2, X, False),
        (replaced, X, False),
        (lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False), X, False),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X, False),
        (lambda x: x + x.shape[0], X, True),
        (lambda x: x + 1, torch.complex(X, X).conj(), False),
    ],
)
def test_graphs_without_a_key(written, argument, dynamic, monkeypatch) -> None:
    monkeypatch.setattr(nn.functional, "relu6", of_user)
    assert text_of(written, argument, dynamic=dynamic) is None
