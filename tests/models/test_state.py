"""What a compiled model shares with the rest of the program: parameters, buffers, inputs, modes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.models.model_checks import (
    BACKEND,
    check_forward,
    compiled,
    no_fallbacks,
    tensors_of,
)

pytestmark = pytest.mark.rotates(3)


class Tied(nn.Module):
    """Embeds and projects with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.output = nn.Linear(16, 40, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


class Counter(nn.Module):
    """Keeps a running sum and the number of calls."""

    total: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum(dim=0))
        self.calls += 1
        return self.total / self.calls


def test_tied_weights() -> None:
    model = Tied().eval()
    function = check_forward(model, torch.randint(0, 40, (3, 5)))
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    tokens = torch.randint(0, 40, (3, 5))
    with torch.no_grad(), no_fallbacks():
        assert_close(function(tokens), model(tokens))


def test_parameters_updated_in_place() -> None:
    model = nn.Linear(8, 4).eval()
    function = compiled(model)
    x = torch.randn(3, 8)
    with torch.no_grad(), no_fallbacks():
        for value in range(4):
            model.weight.copy_(torch.randn(4, 8))
            model.bias[value] = 10.0
            assert_close(function(x), model(x))


def test_parameters_replaced_and_loaded() -> None:
    model = nn.Linear(8, 4).eval()
    function = compiled(model)
    x = torch.randn(3, 8)
    with torch.no_grad(), no_fallbacks():
        assert_close(function(x), model(x))
        model.weight.data = torch.randn(4, 8)
        assert_close(function(x), model(x))
        model.load_state_dict(nn.Linear(8, 4).state_dict())
        assert_close(function(x), model(x))
        model.weight = nn.Parameter(torch.randn(4, 8))
        assert_close(function(x), model(x))


def test_unchanged_parameters_travel_once() -> None:
    import torch_webgpu_compile

    model = nn.Linear(64, 64).eval()
    function = compiled(model)
    x = torch.randn(2, 64)
    with torch.no_grad(), no_fallbacks():
        function(x)
        if BACKEND != "webgpu":
            return
        before = torch_webgpu_compile.counters.bytes_uploaded
        for _ in range(3):
            function(x)
        uploaded = torch_webgpu_compile.counters.bytes_uploaded - before
    assert uploaded == 3 * x.nbytes


def test_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).train()
    other = copy.deepcopy(model)
    function = compiled(model)
    with torch.no_grad(), no_fallbacks():
        for _ in range(3):
            x = torch.randn(4, 3, 8, 8)
            assert_close(function(x), other(x))
            for buffer, expected in zip(model.buffers(), other.buffers(), strict=True):
                assert_close(buffer, expected)
        model.eval(), other.eval()
        x = torch.randn(4, 3, 8, 8)
        assert_close(function(x), other(x))


def test_mutated_buffers() -> None:
    model, other = Counter(), Counter()
    function = compiled(model)
    with no_fallbacks():
        for _ in range(4):
            x = torch.randn(3, 4)
            assert_close(function(x), other(x))
            assert_close(model.total, other.total)
            assert model.calls.equal(other.calls)


def test_mutated_input_and_aliasing_output() -> None:
    def step(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache[:, 1:3] = x * 2
        return cache, x.view(-1), cache.sum(dim=0)

    x, cache, other = torch.randn(3, 2), torch.zeros(3, 5), torch.zeros(3, 5)
    with torch.no_grad(), no_fallbacks():
        actual = compiled(step)(x, cache)
    expected = step(x, other)
    assert_close(cache, other)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours, theirs)
    assert actual[0].data_ptr() == cache.data_ptr()
    assert actual[1].data_ptr() == x.data_ptr()


def test_inference_mode() -> None:
    check_forward(Tied().eval(), torch.randint(0, 40, (3, 5)), context=torch.inference_mode)


def test_grad_mode_changes_between_calls() -> None:
    model = nn.Linear(8, 4)
    function = compiled(model)
    x = torch.randn(3, 8)
    with no_fallbacks():
        with torch.no_grad():
            assert not function(x).requires_grad
        function(x).sum().backward()
        with torch.inference_mode():
            assert_close(function(x), model(x))
    assert model.weight.grad is not None
    assert_close(model.bias.grad, torch.full((4,), 3.0))


def test_results_of_earlier_calls_stay() -> None:
    model = nn.Linear(8, 4).eval()
    function = compiled(model)
    inputs = [torch.randn(3, 8) for _ in range(5)]
    with torch.no_grad(), no_fallbacks():
        results = [function(x) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            assert_close(result, model(x))


def test_nested_outputs_and_constants() -> None:
    def function(x: Tensor, scale: float) -> dict[str, object]:
        return {"a": (x * scale, 3), "b": [torch.arange(4), None, x.shape[0]], "c": x}

    x = torch.randn(3)
    with no_fallbacks():
        actual = compiled(function)(x, 2.5)
    expected = function(x, 2.5)
    for ours, theirs in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert_close(ours, theirs)
    assert actual["a"][1] == 3
    assert actual["b"][1:] == [None, 3]
    assert actual["c"] is x


def test_same_model_compiled_twice() -> None:
    model = nn.Linear(8, 4).eval()
    x = torch.randn(3, 8)
    with torch.no_grad(), no_fallbacks():
        assert_close(compiled(model)(x), model(x))
        assert_close(compiled(model, mode="reduce-overhead")(x), model(x))
