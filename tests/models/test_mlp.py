"""An MNIST-style classifier: linear, ReLU, argmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models.model_checks import DTYPES, check_forward

pytestmark = pytest.mark.rotates(3)


class Classifier(nn.Module):
    """28×28 images to (logits, digit)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(images)
        return logits, logits.argmax(dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 64])
def test_mlp(batch: int, dtype: torch.dtype) -> None:
    # In f16 and bf16 the two largest logits of an untrained model may round to a tie.
    model = Classifier().eval().to(dtype)
    if dtype != torch.float32:
        model.forward = model.layers.forward  # type: ignore[method-assign]
    check_forward(model, torch.rand(batch, 1, 28, 28, dtype=dtype))


def test_log_probabilities() -> None:
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 7), nn.LogSoftmax(dim=-1))
    check_forward(model.eval(), torch.randn(33, 20))
