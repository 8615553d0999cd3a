"""Recurrent networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models.model_checks import check_forward

pytestmark = pytest.mark.rotates(9)


class Tagger(nn.Module):
    """A label for each token, from a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(64, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(tokens))[0])


class Cell(nn.Module):
    """A recurrence written out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 32)
        for step in x:
            h, c = self.cell(step, (h, c))
        return h


@pytest.mark.parametrize("layers", [1, 2])
def test_lstm(layers: int) -> None:
    check_forward(nn.LSTM(16, 32, num_layers=layers).eval(), torch.randn(9, 3, 16))


def test_lstm_with_state() -> None:
    state = (torch.randn(1, 3, 32), torch.randn(1, 3, 32))
    check_forward(nn.LSTM(16, 32).eval(), torch.randn(4, 3, 16), state)


def test_tagger() -> None:
    check_forward(Tagger().eval(), torch.randint(0, 200, (2, 11)))


def test_cell() -> None:
    check_forward(Cell().eval(), torch.randn(6, 3, 16))


def test_gru() -> None:
    check_forward(nn.GRU(16, 32).eval(), torch.randn(5, 2, 16))
