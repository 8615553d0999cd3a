"""Modules that move keep their parameters, as they do on ``cuda``."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn


def tied() -> Any:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def is_tied(model: Any) -> bool:
    return model[0].weight is model[1].weight


MOVES = {
    "to": lambda m: m.to("webgpu"),
    "webgpu": lambda m: m.webgpu(),
    "to another": lambda m: m.to("webgpu").to("webgpu:1"),
    "there and back": lambda m: m.to("webgpu").cpu(),
    "to, with a dtype": lambda m: m.to("webgpu", torch.bfloat16),
    "half": lambda m: m.webgpu().half(),
    "float64 and back": lambda m: m.double().to("webgpu").float(),
    "to_empty": lambda m: m.to_empty(device="webgpu"),
}


@pytest.mark.parametrize("name", MOVES)
def test_parameters_stay_the_same_objects(name: str) -> None:
    model = tied()
    parameter = model[0].weight
    parameter.note = "kept"
    reference = weakref.ref(parameter)
    MOVES[name](model)
    assert model[0].weight is parameter
    assert is_tied(model)
    assert reference() is parameter
    assert parameter.note == "kept"
    assert type(parameter) is nn.Parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_values_and_gradients_move() -> None:
    model = tied()
    model(torch.tensor([1, 2])).sum().backward()
    value, gradient = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    model.to("webgpu")
    assert model[0].weight.grad.device == torch.device("webgpu:0")
    assert torch.equal(model[0].weight.cpu(), value)
    assert torch.equal(model[0].weight.grad.cpu(), gradient)
    model.cpu()
    assert torch.equal(model[0].weight, value)
    assert torch.equal(model[0].weight.grad, gradient)


def test_optimizers_made_before_keep_what_they_update() -> None:
    torch.manual_seed(0)
    here, there = tied(), tied()
    there.load_state_dict(here.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (here, there)]
    here.to("webgpu")
    for model, optimizer in zip((here, there), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([1, 2], device=model[0].weight.device)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(here[0].weight.cpu(), there[0].weight)


def test_hooks_stay() -> None:
    model: Any = nn.Linear(2, 2)
    called: list[str] = []
    model.weight.register_hook(lambda gradient: called.append("hook"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append("after"))
    model.to("webgpu")(torch.ones(1, 2, device="webgpu")).sum().backward()
    assert called == ["hook", "after"]


def test_graphs_recorded_before() -> None:
    """As on other devices: the gradient is where the forward pass was."""
    model = tied()
    loss = model(torch.tensor([1])).sum()
    model.to("webgpu")
    loss.backward()
    assert model[0].weight.grad.device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: nn.LSTM(3, 3),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=False)]),
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    ],
)
def test_kinds_of_modules(make: Any) -> None:
    model = make()
    before = list(model.parameters())
    model.to("webgpu")
    after = list(model.parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert {t.device.type for t in model.state_dict().values()} == {"webgpu"}
    if isinstance(model, nn.LSTM):
        assert all(w.device.type == "webgpu" for w in model._flat_weights)


@pytest.mark.parametrize(
    "move", [nn.Module.half, nn.Module.cpu, lambda model: model.to("webgpu", torch.float16)]
)
def test_a_module_without_sizes_changes_dtype_and_device(move):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to("webgpu")
    expected, device = next(move(model).parameters()).data.dtype, model[0].weight.device
    assert model[1].running_mean.dtype is expected
    result = model.float()(torch.ones(2, 5, device=device))
    assert result.device == device


@pytest.mark.parametrize("device", ["webgpu", "webgpu:1"])
def test_lazy_modules(device: str) -> None:
    model: Any = nn.LazyLinear(3).to(device)
    assert model(torch.ones(2, 4, device=device)).shape == (2, 3)
    model = nn.LazyLinear(3)
    assert model.webgpu()(torch.ones(2, 4, device="webgpu")).shape == (2, 3)


def test_copies_are_tied_too() -> None:
    model = tied().to("webgpu")
    again = copy.deepcopy(model)
    assert is_tied(again)
    assert again[0].weight is not model[0].weight
    assert torch.equal(again[0].weight, model[0].weight)


@pytest.mark.parametrize("setting", ["swap", "overwrite"])
def test_what_the_user_set_holds(setting: str) -> None:
    set_it = getattr(torch.__future__, f"set_{setting}_module_params_on_conversion")
    set_it(True)
    try:
        model = tied()
        parameter = model[0].weight
        model.to("webgpu")
        assert (model[0].weight is parameter) == is_tied(model) == (setting == "swap")
    finally:
        set_it(False)


DATA = {
    "to the device": ("cpu", "webgpu:0"),
    "to the host": ("webgpu:0", "cpu"),
    "to another device": ("webgpu:0", "webgpu:1"),
}


@pytest.mark.parametrize("name", DATA)
def test_data_of_another_device(name: str) -> None:
    """What bitsandbytes, peft and the group offloading of diffusers do with parameters."""
    here, there = DATA[name]
    called: list[str] = []
    parameter = nn.Parameter(torch.arange(4.0, device=here))
    parameter.note = "kept"
    parameter.register_hook(lambda gradient: called.append(str(gradient.device)))
    parameter.square().sum().backward()
    gradient, view, version = parameter.grad, parameter.detach()[1:], parameter._version
    data = torch.arange(6.0, device=there).to(torch.bfloat16).view(2, 3)
    parameter.data = data
    assert (parameter.device, parameter.dtype) == (data.device, data.dtype)
    assert parameter.data_ptr() == data.data_ptr()
    assert parameter.note == "kept"
    assert parameter._version == version
    assert parameter.grad is gradient
    assert view.device == torch.device(here)
    assert view.tolist() == [1, 2, 3]
    parameter.grad = None
    parameter.square().sum().backward()
    assert parameter.grad.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert called == [here, there]
    parameter.data.zero_()
    assert data.tolist() == [[0] * 3] * 2
    with pytest.raises(RuntimeError, match="must be floating point"):
        parameter.data = torch.ones(2, dtype=torch.int64, device=here)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_compiled_graphs_see_new_data(device: str) -> None:
    model: Any = nn.Linear(3, 3).to(device)
    compiled = torch.compile(model, backend="webgpu")
    x = torch.ones(2, 3, device=device)
    other = "webgpu" if device == "cpu" else "cpu"
    with torch.no_grad():
        for _ in range(2):  # the same graph, then one for tensors of another place
            compiled(x)
            for value in (2.0, 3.0):
                model.weight.data = torch.full((3, 3), value, device=x.device)
                torch.testing.assert_close(compiled(x), model(x))
            for parameter in model.parameters():
                parameter.data = parameter.data.to(other)
            x, other = x.to(other), str(x.device)


def test_tensors_of_inference_mode() -> None:
    x = torch.ones(2, device="webgpu")
    with torch.inference_mode():
        assert (x * 2).is_inference()
        assert torch.ones(2, device="webgpu:1").is_inference()
    assert not (x * 2).is_inference()


class Moving(torch.nn.Module):
    """Takes and gives CPU tensors, and computes on the device, with a parameter of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3).to("webgpu")
        self.register_buffer("mean", torch.zeros(3))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x.to("webgpu") * self.scale.to("webgpu"))
        self.mean.add_(y.detach().mean(0).cpu())
        return y.cpu() + 1, y


def test_compiled_functions_move_tensors() -> None:
    """What a compiled function left on the CPU was on the device, gradients too."""
    torch.manual_seed(0)
    plain = Moving()
    module = copy.deepcopy(plain)
    compiled = torch.compile(module, backend="webgpu", fullgraph=True)
    x, same = (torch.linspace(-1, 1, 6).view(2, 3).requires_grad_() for _ in range(2))
    for _ in range(2):
        found, wanted = compiled(x), plain(same)
        assert [y.device for y in found] == [y.device for y in wanted]
        for results in (found, wanted):
            results[0].square().sum().backward()
        pairs = [*zip(module.parameters(), plain.parameters(), strict=True), (x, same)]
        torch.testing.assert_close(*zip(*((a.grad, b.grad) for a, b in pairs), strict=True))
        torch.testing.assert_close(module.mean, plain.mean)
