"""One plan serves many sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.models.model_checks import BACKEND, compiled, no_fallbacks, plans_compiled
from tests.models.test_training import LanguageModel, convnet

pytestmark = pytest.mark.rotates(6)


def plans_since(before: int) -> int:
    """Plans compiled since, at least 1: 0 is what other backends report."""
    return plans_compiled() - before if BACKEND == "webgpu" else 1


def test_dynamic_batch() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 3)).eval()
    function = compiled(model, dynamic=True)
    with torch.no_grad(), no_fallbacks():
        before = plans_compiled()
        for rows in (7, 2, 64, 1000, 3):
            x = torch.randn(rows, 16)
            assert_close(function(x), model(x), rtol=1e-5, atol=1e-5)
        assert plans_since(before) == 1


def test_mark_dynamic() -> None:
    model = LanguageModel().eval()
    function = compiled(model)
    with torch.no_grad(), no_fallbacks():
        before = plans_compiled()
        for tokens in (9, 5, 33):
            x = torch.randint(0, 50, (2, tokens))
            torch._dynamo.mark_dynamic(x, 1)
            assert_close(function(x), model(x), rtol=1e-5, atol=1e-5)
        assert plans_since(before) == 1


def test_automatic_dynamic() -> None:
    """With dynamic=None the second size compiles once more, and serves all that follow."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Softmax(dim=0)).eval()
    function = compiled(model)
    with torch.no_grad(), no_fallbacks():
        before = plans_compiled()
        for rows in (7, 8, 9, 40, 41):
            x = torch.randn(rows, 16)
            assert_close(function(x), model(x))
        assert plans_since(before) <= 2


def test_static() -> None:
    model = nn.Linear(16, 8).eval()
    function = compiled(model, dynamic=False)
    with torch.no_grad(), no_fallbacks():
        before = plans_compiled()
        for rows in (7, 8, 7):
            x = torch.randn(rows, 16)
            assert_close(function(x), model(x))
        if BACKEND == "webgpu":
            assert plans_since(before) == 2


def test_dynamic_images() -> None:
    model = convnet().eval()
    function = compiled(model, dynamic=True)
    with torch.no_grad(), no_fallbacks():
        for size in (16, 24, 31):
            x = torch.randn(2, 3, size, size)
            assert_close(function(x), model(x), rtol=1e-5, atol=1e-5)


def test_sizes_in_the_result() -> None:
    def function(x: Tensor) -> tuple[Tensor, int, Tensor]:
        rows, columns = x.shape
        return x.reshape(columns, rows) / rows, rows * columns, torch.arange(rows + 1)

    dynamic = compiled(function, dynamic=True)
    with no_fallbacks():
        for shape in ((3, 4), (5, 2), (6, 7)):
            x = torch.randn(shape)
            actual, expected = dynamic(x), function(x)
            assert_close(actual[0], expected[0])
            assert actual[1] == expected[1]
            assert_close(actual[2], expected[2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_with_changing_batch(dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    function = compiled(model, dynamic=dynamic)
    for rows in (4, 9):
        x = torch.randn(rows, 6)
        model.zero_grad()
        model(x).square().sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        with no_fallbacks():
            function(x).square().sum().backward()
        actual = [p.grad for p in model.parameters()]
        for ours, theirs in zip(actual, expected, strict=True):
            assert_close(ours, theirs)
