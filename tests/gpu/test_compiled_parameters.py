"""Parameters of compiled functions: uploaded once, again when they change, freed when they die."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import torch_webgpu_compile
from tests.compiling import compiled
from torch_webgpu_compile import counters

pytestmark = pytest.mark.usefixtures("fresh")


def test_parameters_travel_once():
    model = nn.Linear(64, 64)
    f = compiled(model)
    x = torch.randn(2, 64)
    with torch.no_grad():
        f(x)
        first = counters.bytes_uploaded
        f(x)
    assert first >= 64 * 64 * 4
    assert counters.bytes_uploaded - first == x.nbytes


def _double_in_place(model):
    with torch.no_grad():
        model.weight.mul_(2)


def _assign_data(model):
    model.weight.data = torch.randn(3, 4)


def _assign_parameter(model):
    model.weight = nn.Parameter(torch.randn(3, 4))


def _load_state(model):
    model.load_state_dict({"weight": torch.randn(3, 4), "bias": torch.randn(3)})


def _optimize(model):
    model(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.5).step()


CHANGES = [_double_in_place, _assign_data, _assign_parameter, _load_state, _optimize]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_are_seen(change):
    model = nn.Linear(4, 3)
    f = compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x))
    change(model)
    with torch.no_grad():
        torch.testing.assert_close(f(x), model(x))
        torch.testing.assert_close(f(x), model(x))


def test_changes_behind_pytorchs_back_need_invalidate():
    model = nn.Linear(4, 3)
    f = compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        f(x)
        model.weight.data.mul_(2)
        torch_webgpu_compile.invalidate(model.weight)
        torch.testing.assert_close(f(x), model(x))
        model.weight.detach().numpy()[:] = 1
        torch_webgpu_compile.invalidate()
        torch.testing.assert_close(f(x), model(x))


def test_tied_parameters_travel_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i):
            return self.head(self.embed(i))

    model = Tied()
    i = torch.tensor([1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(i), model(i))
    assert counters.bytes_uploaded == 50 * 32 * 4 + i.nbytes


def test_two_graphs_share_the_copies_of_parameters():
    model = nn.Linear(64, 64)
    first, second = compiled(model), compiled(lambda x: model(x).relu())
    x = torch.randn(2, 64)
    with torch.no_grad():
        first(x)
        before = counters.bytes_uploaded
        second(x)
    assert counters.bytes_uploaded - before == x.nbytes


def test_memory_of_dead_parameters_is_freed():
    from torch_webgpu_compile.backend import device_for
    from torch_webgpu_compile.options import from_environment

    device = device_for(from_environment())
    gc.collect()
    before = device.memory_stats()["allocated"]
    model = nn.Linear(1024, 1024, bias=False)
    f = compiled(model)
    with torch.no_grad():
        f(torch.randn(1, 1024))
    assert device.memory_stats()["allocated"] - before >= 4 << 20
    del model, f
    torch._dynamo.reset()
    gc.collect()
    assert device.memory_stats()["allocated"] - before < 1 << 20
