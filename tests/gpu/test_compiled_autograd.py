"""Gradients that Dynamo traces, of graphs whose activations stay on the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.usefixtures("fresh")
@torch._dynamo.config.patch(compiled_autograd=True)
def test_a_step_whose_backward_pass_is_traced() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    @torch.compile(backend="webgpu")
    def step(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    for _ in range(2):
        model.zero_grad()
        step(x)
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
