"""A share of `tests.fuzz.expressions`, and that it can find something."""

from __future__ import annotations

import pytest
import torch

from . import expressions


@pytest.mark.parametrize("batch", range(8))
def test_random_expressions(batch):
    wrong = expressions.wrong_of(expressions.draw_batch(0, batch))
    assert not wrong, "\n".join(wrong)


def test_a_lost_nan_is_found(monkeypatch):
    def compiles_to_zero(function, **options):
        return lambda *operands: [torch.zeros_like(t) for t in function(*operands)]

    monkeypatch.setattr(torch, "compile", compiles_to_zero)
    assert len(expressions.wrong_of(["x-x", "x*2", "y.sin()", "(k%3).to(dtype)"])) == 3
