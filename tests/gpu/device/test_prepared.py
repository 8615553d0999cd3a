"""What a compiled graph computes from parameters once: never from what they were before."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import torch_webgpu_compile
from tests.compiling import compiled
from tests.prepared_models import Convolutions, Mixing, check, dispatches
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.runtime.device import device_for

pytestmark = pytest.mark.rotates(12)

BOTH = pytest.mark.parametrize("place", ["cpu", "webgpu"])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


CHANGES: dict[str, Callable[[Mixing], Any]] = {
    "copy_": lambda m: m.weight.copy_(torch.randn(16, 16)),
    "mul_": lambda m: m.weight.mul_(3),
    "a part": lambda m: m.weight[3:5].fill_(4),
    "a column": lambda m: m.weight[:, 2].fill_(4),
    "data": lambda m: setattr(m.weight, "data", torch.randn(16, 16).to(m.weight.device)),
    "parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.randn_like(m.weight))),
    "load_state_dict": lambda m: m.load_state_dict(Mixing().state_dict()),
    "load and assign": lambda m: m.load_state_dict(
        {k: v.to(m.weight.device) for k, v in Mixing().state_dict().items()}, assign=True
    ),
    "index_put": lambda m: m.weight.index_put_(
        (torch.tensor([1, 2], device=m.weight.device),), torch.tensor(7.0, device=m.weight.device)
    ),
    "addmm out": lambda m: torch.mm(m.weight.clone(), m.weight.clone(), out=m.weight.data),
    "view": lambda m: m.weight.view(-1)[::3].zero_(),
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_parameters(place: str, change: str) -> None:
    if change == "addmm out" and place == "cpu":
        pytest.skip("versions of .data are not counted; see static_copies.invalidate")
    model = Mixing().eval().to(place)
    function = compiled(model)
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        check(function, model, x)
        for _ in range(2):
            CHANGES[change](model)
            check(function, model, x)


@BOTH
def test_changes_that_no_version_counts(place: str) -> None:
    model = Mixing().eval().to(place)
    function = compiled(model)
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        check(function, model, x)
        for change in (lambda w: w.mul_(2), lambda w: w.copy_(torch.randn(16, 16)), Tensor.zero_):
            change(model.weight.data)
            if place == "cpu":
                torch_webgpu_compile.invalidate(model.weight)
            check(function, model, x)


@BOTH
def test_prepared_once(place: str) -> None:
    model = Convolutions().eval().to(place)
    x = torch.randn(2, 8, 12, 12).to(place)
    function = compiled(model)
    with torch.no_grad():
        first = dispatches(function, x)
        each = dispatches(function, x)
        assert dispatches(function, x) == each < first
        check(function, model, x)
        model.layers[3].weight.mul_(2)
        assert dispatches(function, x) == first
        check(function, model, x)
        model.layers[3].bias.mul_(2)  # not prepared
        assert dispatches(function, x) == each
        check(function, model, x)


@BOTH
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_between_training_steps(place: str, optimizer: Any) -> None:
    model = Convolutions().to(place)
    function = compiled(model)
    steps = optimizer(model.parameters(), lr=0.1)
    x = torch.randn(2, 8, 12, 12).to(place)
    for _ in range(3):
        model.train()
        function(x).square().mean().backward()
        steps.step()
        steps.zero_grad()
        model.eval()
        with torch.no_grad():
            check(function, model, x)


def test_compiled_optimizer() -> None:
    model = Mixing().to("webgpu")
    function = compiled(model)
    steps = torch.optim.SGD(model.parameters(), lr=0.5)
    step = torch.compile(steps.step, backend="webgpu")
    x = torch.randn(4, 16).to("webgpu")
    for _ in range(3):
        function(x).square().mean().backward()
        step()
        steps.zero_grad()
        with torch.no_grad():
            check(function, model, x)


@BOTH
def test_functional_call(place: str) -> None:
    model = Mixing().eval().to(place)
    x = torch.randn(4, 16).to(place)

    def call(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    function = compiled(call)
    with torch.no_grad():
        for _ in range(3):
            weights = {"weight": torch.randn(16, 16).to(place)}
            for _ in range(2):
                assert_close(function(weights, x).cpu(), call(weights, x).cpu())
                weights["weight"].mul_(2)


@BOTH
def test_weights_as_arguments(place: str) -> None:
    function = compiled(lambda x, w: x @ F.softmax(w, -1))
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        for _ in range(3):
            w = torch.randn(16, 16).to(place)
            assert_close(function(x, w).cpu(), x.cpu() @ F.softmax(w.cpu(), -1))


@BOTH
def test_graph_that_changes_its_parameter(place: str) -> None:
    class Decaying(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            self.weight.mul_(0.5)
            return result

    model = Decaying().eval().to(place)
    other = copy.deepcopy(model).cpu()
    function = compiled(model)
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        for _ in range(4):
            assert_close(function(x).cpu(), other(x.cpu()), atol=1e-5, rtol=1e-5)
            assert_close(model.weight.cpu(), other.weight)


@BOTH
def test_one_graph_changes_what_another_prepared_from(place: str) -> None:
    model = Mixing().eval().to(place)
    function = compiled(model)

    def change(weight: Tensor, row: Tensor) -> None:
        weight.index_copy_(0, torch.tensor([2, 5], device=weight.device), row)

    changing = compiled(change)
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        for _ in range(3):
            check(function, model, x)
            changing(model.weight, torch.randn(2, 16).to(place))


@BOTH
def test_two_models_share_a_parameter(place: str) -> None:
    first, second = Mixing().eval().to(place), Mixing().eval().to(place)
    second.weight = first.weight
    functions = [compiled(first), compiled(second)]
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        for _ in range(3):
            check(functions[0], first, x)
            check(functions[1], second, x)
            first.weight.mul_(2)


@BOTH
def test_layers_that_share_code(place: str) -> None:
    layers = [Mixing().eval().to(place) for _ in range(4)]
    functions = [compiled(layer) for layer in layers]
    x = torch.randn(4, 16).to(place)
    with torch.no_grad():
        for _ in range(3):
            for function, layer in zip(functions, layers, strict=True):
                check(function, layer, x)
        each = {dispatches(function, x) for function in functions for _ in range(2)}
        assert len(each) == 1, "a layer was prepared again"


@BOTH
def test_sizes_that_change(place: str) -> None:
    model = Convolutions().eval().to(place)
    function = compiled(model, dynamic=True)
    with torch.no_grad():
        for images, side in ((2, 12), (3, 17), (2, 12), (5, 20)):
            check(function, model, torch.randn(images, 8, side, side).to(place))
        model.layers[3].weight.neg_()
        check(function, model, torch.randn(2, 8, 12, 12).to(place))


@BOTH
def test_inference_mode(place: str) -> None:
    with torch.inference_mode():
        model = Mixing().eval().to(place)
        function = compiled(model)
        x = torch.randn(4, 16).to(place)
        check(function, model, x)
        model.weight.mul_(2)
        check(function, model, x)


@BOTH
def test_empty_cache(place: str) -> None:
    model = Convolutions().eval().to(place)
    x = torch.randn(2, 8, 12, 12).to(place)
    function = compiled(model)
    with torch.no_grad():
        check(function, model, x)
        for _ in range(2):
            device_for(resolve()).empty_cache()
            torch.webgpu.empty_cache()  # type: ignore[attr-defined]
            check(function, model, x)


@BOTH
def test_memory_returns_with_the_parameter(place: str) -> None:
    """A code that outlives its parameters keeps nothing of what was prepared from them."""
    device = device_for(resolve())
    size = 512
    model = Mixing(size).eval().to(place)
    function = compiled(model)
    x = torch.randn(4, size).to(place)

    def allocated() -> int:
        gc.collect()
        return device.pool.stats()["allocated"]

    with torch.no_grad():
        for _ in range(3):
            function(x)
        before = allocated()
        for _ in range(4):
            model.weight = nn.Parameter(torch.randn(size, size).to(place))
            check(function, model, x)
        assert allocated() <= before
        model.weight.data = torch.zeros(size, size).to(place)
        check(function, model, x)
        assert allocated() <= before


@BOTH
def test_threads(place: str) -> None:
    model = Convolutions().eval().to(place)
    x = torch.randn(2, 8, 12, 12).to(place)
    function = compiled(model)
    failures: list[BaseException] = []
    with torch.no_grad():
        function(x)
        for _ in range(3):
            model.layers[3].weight.mul_(-1.5)
            wanted = copy.deepcopy(model).cpu()(x.cpu())

            def call(wanted: Tensor = wanted) -> None:
                try:
                    with torch.no_grad():
                        assert_close(function(x).cpu(), wanted, atol=1e-4, rtol=1e-4)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not failures


@BOTH
def test_constants(place: str) -> None:
    """A table made from nothing, used twice, is prepared in training too; a returned one never."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(16, device=x.device)[:, None] / torch.arange(1, 17, device=x.device)
        table = torch.softmax(torch.sin(places), -1)
        return (x @ table).cos() @ table, torch.full_like(x, 2.0)

    made = compiled(function)
    x = torch.randn(4, 16).to(place).requires_grad_()
    for _ in range(2):
        got, wanted = made(x), function(x.cpu())
        assert_close(got[0].cpu(), wanted[0], atol=1e-5, rtol=1e-5)
        got[0].sum().backward()
        assert_close(got[1].cpu(), wanted[1])
        with torch.no_grad():
            got[1].mul_(5)  # the caller's own


def test_autocast() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    function = compiled(model)
    x = torch.randn(256, 64)
    with torch.no_grad():
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):  # afresh: eager keeps casts of weights
                assert_close(function(x), model(x), atol=2e-2, rtol=2e-2)
            model[0].weight.mul_(1.5)
