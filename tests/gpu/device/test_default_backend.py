"""``torch.compile`` without ``backend=``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torch_webgpu_compile import counters


@pytest.mark.parametrize(
    "options", [{}, {"mode": "reduce-overhead"}, {"backend": "inductor", "fullgraph": True}]
)
def test_device_tensors_are_compiled_for_the_device(fresh, options):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to("webgpu")
    x = torch.randn(2, 4, device="webgpu")
    wanted = model(x)
    before = counters.plans_compiled
    got = torch.compile(model, **options)(x)
    assert counters.plans_compiled > before
    torch.testing.assert_close(got.cpu(), wanted.cpu())
    got.sum().backward()
    assert model[0].weight.grad is not None


def test_cpu_tensors_stay_with_inductor(fresh, monkeypatch):
    asked = []

    def inductor(module, inputs, **keywords):
        asked.append(module)
        return module

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert len(asked) == 1
    assert counters.plans_compiled == 0
