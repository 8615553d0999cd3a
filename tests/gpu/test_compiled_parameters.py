"""Parameters of compiled functions: uploaded once, again when they change, freed when they die."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import torch_webgpu_compile
from tests.compiling import compiled
from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(3), pytest.mark.usefixtures("fresh")]


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


@pytest.mark.rotates(1)
def test_a_change_of_one_element_is_seen():
    model = nn.Linear(400, 300)
    f, x = compiled(model), torch.ones(2, 400)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x))
        model.weight[150, 200] += 1
        torch.testing.assert_close(f(x), model(x))


def _multiply_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(2)


def _change_numpy(model):
    model.weight.detach().numpy()[:] *= 3


def _assign_data_twice(model):  # the second one gets the memory of the one before the first
    model.weight.data = model.weight.data - 0.5
    model.weight.data = model.weight.data * 2


def _step_fused(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), 0.5, fused=True).step()


def _average(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(0.99).add_(torch.randn_like(parameter), alpha=0.01)


def _share(model):
    model.share_memory()
    _multiply_data(model)


def _move_storage(model):
    storage = model.weight.untyped_storage()
    storage.resize_(0)
    storage.resize_(model.weight.numel() * 4)
    model.weight.data.fill_(0.25)


def _new_parameter_on_the_same_memory(model):
    data = model.weight.data
    data[1, 2] += 1
    model.weight = nn.Parameter(data)


UNCOUNTED = [
    _multiply_data,
    _change_numpy,
    _assign_data_twice,
    _step_fused,
    _average,
    _share,
    _move_storage,
    _new_parameter_on_the_same_memory,
]


@pytest.mark.parametrize("change", UNCOUNTED)
def test_changes_that_pytorch_does_not_count_are_seen(change):
    model = nn.Linear(400, 300)
    f = compiled(model)
    x = torch.randn(2, 400)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(f(x), model(x), atol=1e-3, rtol=1e-4)
            with torch.enable_grad():
                change(model)
            torch.testing.assert_close(f(x), model(x), atol=1e-3, rtol=1e-4)
        before = counters.bytes_uploaded
        f(x)
    assert counters.bytes_uploaded - before == x.nbytes


@pytest.mark.parametrize("change", [_multiply_data, _step_fused])
def test_backward_graphs_see_them_too(change):
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30))
    eager = copy.deepcopy(model)
    f = compiled(model)
    for _ in range(3):
        gradients = []
        for function, owner in ((f, model), (eager, eager)):
            owner.zero_grad()
            x = torch.linspace(-1, 1, 60).view(2, 30).requires_grad_()
            function(x).square().sum().backward()
            gradients.append([x.grad, *(p.grad.clone() for p in owner.parameters())])
            change(owner)
        torch.testing.assert_close(*gradients)


def test_one_uncounted_change_gives_the_others_away():
    """What trains a model may change few rows of an embedding, but it changes more than that."""
    model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 3))
    frozen = nn.Linear(8, 3).requires_grad_(False)
    f = compiled(lambda i: model(i) + frozen(model[0](i)))
    i = torch.tensor([1234])
    with torch.no_grad():
        f(i)
        before = counters.bytes_uploaded
        model[0].weight.data[1234] += 1
        model[1].bias.data += 1
        torch.testing.assert_close(f(i), model(i) + frozen(model[0](i)))
        sizes = sum(p.nbytes for p in model.parameters())
        assert counters.bytes_uploaded - before == sizes + i.nbytes
        frozen.bias.data += 1  # those that do not learn are another kind
        torch.testing.assert_close(f(i), model(i) + frozen(model[0](i)))
        frozen_sizes = sum(p.nbytes for p in frozen.parameters())
    assert counters.bytes_uploaded - before == sizes + frozen_sizes + 2 * i.nbytes


def test_fused_optimizers_that_change_few_rows_are_seen():
    model = nn.Embedding(5000, 8)
    f = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    i = torch.tensor([1234])
    f(i).sum().backward()
    optimizer.step()
    torch.testing.assert_close(f(i), model(i))


def test_an_uncounted_change_travels_once_for_all_graphs():
    model = nn.Linear(64, 64)
    graphs = compiled(model), compiled(lambda x: model(x).relu())
    x = torch.randn(2, 64)
    with torch.no_grad():
        for f in graphs:
            f(x)
        before = counters.bytes_uploaded
        _multiply_data(model)
        torch.testing.assert_close(graphs[0](x), model(x))
        torch.testing.assert_close(graphs[1](x), model(x).relu())
    assert counters.bytes_uploaded - before == 2 * x.nbytes + 65 * 64 * 4


def test_layers_that_share_their_code_keep_their_copies():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return self.linear(x).tanh()

    model = nn.Sequential(*(Layer() for _ in range(3)))
    x = torch.randn(2, 16)
    with torch.no_grad():
        wanted = model(x)
        for layer in model:
            layer.compile(backend="webgpu", fullgraph=True)
        torch.testing.assert_close(model(x), wanted)
        before = counters.bytes_uploaded
        torch.testing.assert_close(model(x), wanted)
        assert counters.bytes_uploaded - before == 3 * x.nbytes
        found = []
        for stance in ("default", "force_eager"):
            model[1].linear.weight.data.mul_(2)
            with torch.compiler.set_stance(stance):
                found.append(model(x))
            model[1].linear.weight.data.mul_(0.5)
        torch.testing.assert_close(*found)


def test_parameters_can_be_swapped():
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    f = compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        f(x)
        wanted = other(x)
        for name in ("weight", "bias"):
            torch.utils.swap_tensors(getattr(model, name), getattr(other, name))
        torch.testing.assert_close(f(x), wanted)


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        return x * self.weight, self.count.clone()


@pytest.mark.parametrize("training", [False, True])
def test_buffers_that_a_graph_changes_and_others_too(training):
    model = _Counting()
    f = compiled(model)
    with torch.set_grad_enabled(training):
        for call in range(1, 5):
            torch.testing.assert_close(f(torch.ones(3))[1], torch.full((3,), float(call)))
        model.count.data.mul_(10)
        torch.testing.assert_close(f(torch.ones(3))[1], torch.full((3,), 41.0))
        model.count.zero_()
        torch.testing.assert_close(f(torch.ones(3))[1], torch.ones(3))
        torch.testing.assert_close(model.count, torch.ones(3))


def test_graphs_that_change_a_buffer_and_graphs_that_only_read_it():
    norm = nn.BatchNorm1d(4)
    eager = copy.deepcopy(norm)
    f = compiled(norm)
    for training in (True, False, True, True, False, False, True, False):
        norm.train(training), eager.train(training)
        x = torch.randn(3, 4) + 2
        before = counters.bytes_uploaded
        torch.testing.assert_close(f(x), eager(x))
        uploaded = counters.bytes_uploaded - before
        torch.testing.assert_close(norm.state_dict(), eager.state_dict())
    assert uploaded == x.nbytes


def test_windows_of_one_buffer_take_little_memory():
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = torch.randn(64, 4096)
            self.register_buffer("window", self.whole[:32])

        def forward(self, x):
            return x + self.window.sum(0)

    from torch_webgpu_compile.options import from_environment
    from torch_webgpu_compile.runtime.device import device_for

    model, device = Window(), device_for(from_environment())
    f = compiled(model)
    gc.collect()
    before = device.pool.stats()["allocated"]
    with torch.no_grad():
        for row in (*range(33), 1, 0):
            model.window = model.whole[row : row + 32]
            torch.testing.assert_close(f(torch.zeros(4096)), model(torch.zeros(4096)))
    assert device.pool.stats()["allocated"] - before < 6 * model.whole.nbytes


def test_changes_of_few_elements_need_invalidate():
    model = nn.Linear(400, 300)
    f = compiled(model)
    x = torch.randn(2, 400)

    def check():
        torch.testing.assert_close(f(x), model(x), atol=1e-3, rtol=1e-4)

    with torch.no_grad():
        check()
        model.weight.data[5, 7] += 9
        torch_webgpu_compile.invalidate(model.weight)
        check()
        model.weight.data[5, 8] += 9
        torch_webgpu_compile.invalidate(model.weight.data)
        check()
        model.weight.detach().numpy()[5, 9] += 9
        torch_webgpu_compile.invalidate()
        check()


def test_invalidate_takes_tensors():
    torch_webgpu_compile.invalidate(torch.ones(3))  # has no copy
    wrong_ones = (torch.ones(3).numpy(), nn.Linear(2, 2), [torch.ones(3)], torch.eye(3).to_sparse())
    for wrong in wrong_ones:
        with pytest.raises(TypeError, match=r"takes a dense tensor, not .*; pass the parameter"):
            torch_webgpu_compile.invalidate(wrong)


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
    from torch_webgpu_compile.options import from_environment
    from torch_webgpu_compile.runtime.device import device_for

    device = device_for(from_environment())
    gc.collect()
    before = device.pool.stats()["allocated"]
    model = nn.Linear(1024, 1024, bias=False)
    f = compiled(model)
    with torch.no_grad():
        f(torch.randn(1, 1024))
    assert device.pool.stats()["allocated"] - before >= 4 << 20
    del model, f
    torch._dynamo.reset()
    gc.collect()
    assert device.pool.stats()["allocated"] - before < 1 << 20


def test_copies_of_dropped_models_are_given_back_when_memory_is_needed():
    from torch_webgpu_compile.options import from_environment
    from torch_webgpu_compile.runtime.device import device_for

    device = device_for(from_environment())
    device.empty_cache()
    before = device.pool.stats()["allocated"]
    model = nn.Linear(1024, 1024, bias=False)
    f, x = compiled(model), torch.randn(1, 1024)
    with torch.no_grad():
        f(x)
        device.empty_cache()
        torch.testing.assert_close(f(x), model(x))
    kept = model.state_dict()
    del model, f
    torch._dynamo.reset()
    gc.collect()
    device.empty_cache()
    assert device.pool.stats()["allocated"] - before < 1 << 20
    assert kept["weight"].shape == (1024, 1024)
