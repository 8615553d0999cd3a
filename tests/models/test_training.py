"""Forward and backward through one compiled step, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.model_checks import (
    assert_as_accurate,
    check_training_step,
    compiled,
    no_fallbacks,
)

pytestmark = pytest.mark.rotates(11)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, features: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(features)
        self.qkv = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.norm_2 = nn.LayerNorm(features)
        self.mlp = nn.Sequential(
            nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, features = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, tokens, 3, self.heads, features // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attention.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Two blocks between an embedding and a projection that share their weight."""

    def __init__(self, tokens: int = 50, features: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, features)
        self.blocks = nn.Sequential(TransformerBlock(features), TransformerBlock(features))
        self.norm = nn.LayerNorm(features)
        self.output = nn.Linear(features, tokens, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.norm(self.blocks(self.embedding(tokens))))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 5)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def test_mlp() -> None:
    check_training_step(mlp(), torch.randn(16, 20))


def test_convnet() -> None:
    check_training_step(convnet(), torch.randn(4, 3, 16, 16))


def test_transformer_block() -> None:
    check_training_step(TransformerBlock(), torch.randn(2, 12, 32))


def test_language_model() -> None:
    check_training_step(LanguageModel(), torch.randint(0, 50, (2, 12)))


@pytest.mark.parametrize(
    ("build", "features"), [(mlp, (20,)), (convnet, (3, 16, 16))], ids=["mlp", "convnet"]
)
def test_sgd_steps(build: Callable[[], nn.Module], features: tuple[int, ...]) -> None:
    """Five steps: the compiled model must see the parameters that the optimizer changed."""
    ours = build()
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    inputs, labels = torch.randn(5, 8, *features), torch.randint(0, 5, (5, 8))

    def train(model: nn.Module, function: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for x, y in zip(data, labels, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(function(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    with no_fallbacks():
        actual = train(ours, compiled(ours), inputs)
    eager, reference = train(theirs, theirs, inputs), train(exact, exact, inputs.double())
    assert_as_accurate(actual, eager, reference, "losses")
    triples = zip(ours.parameters(), theirs.parameters(), exact.parameters(), strict=True)
    for parameter, expected, double in triples:
        assert_as_accurate(parameter.detach(), expected.detach(), double.detach(), "parameter")


def test_loss_inside_the_compiled_function() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    x, y = torch.randn(16, 20), torch.randint(0, 5, (16,))

    def loss(module: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: F.cross_entropy(module(x), y, label_smoothing=0.1)

    with no_fallbacks():
        actual = compiled(loss(model))(x, y)
        actual.backward()
    expected = loss(other)(x, y)
    expected.backward()
    torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
