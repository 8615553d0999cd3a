"""What a training step holds at most: gradients take the place of what was saved, and checkpoints
hold less."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.device_checks import DEVICE
from torch_webgpu_compile.runtime import sections

LAYERS, ROWS, WIDTH = 4, 256, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def no_checkpoint(layer, x):
    return layer(x)


def products_are_kept(context, op, *arguments, **options):
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTED = partial(create_selective_checkpoint_contexts, products_are_kept)
KINDS = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=SELECTED),
}


class Model(nn.Module):
    def __init__(self, run=no_checkpoint):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.run = run

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return x.square().mean()


def trained(run=no_checkpoint, compiled=False, times=1):
    """(the gradients, bytes that a step holds at most beside the parameters)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(run).to(DEVICE)
    x = torch.randn(ROWS, WIDTH).to(DEVICE).requires_grad_()
    call = torch.compile(model, backend="webgpu") if compiled else model
    call(x).backward()  # what is made once
    model.zero_grad()
    x.grad = None
    loss = call(x)
    del loss
    before = torch.webgpu.memory_allocated()
    torch.webgpu.reset_peak_memory_stats()
    loss = call(x)
    for k in range(times):
        loss.backward(retain_graph=k < times - 1)
    peak = torch.webgpu.max_memory_allocated() - before
    return [p.grad.cpu() for p in (*model.parameters(), x)], peak


def test_a_backward_in_sections(monkeypatch):
    """It computes the same in less memory, also twice."""
    whole, most = trained(compiled=True)
    monkeypatch.setattr(sections, "_LEAST_NBYTES", 0)
    monkeypatch.setattr(sections, "_LEFT_SHARE", 0)
    divided, less = trained(compiled=True)
    assert less < 0.9 * most
    for a, b in zip(divided, whole, strict=True):
        assert torch.equal(a, b)
    twice, _ = trained(compiled=True, times=2)
    for a, b in zip(twice, whole, strict=True):
        torch.testing.assert_close(a, 2 * b)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpoints_hold_less(compiled):
    wanted, most = trained(compiled=compiled)
    for kind, run in KINDS.items():
        gradients, peak = trained(run, compiled)
        assert peak < most, kind
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
