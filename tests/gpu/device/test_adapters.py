"""Adapters of peft that are swapped between calls of a compiled model: never stale, found again."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters as dynamo_counters

from torch_webgpu_compile import counters
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.device import autoload
from torch_webgpu_compile.plan import cache as plan_cache

peft = pytest.importorskip("peft")
hotswap = pytest.importorskip("peft.utils.hotswap")

pytestmark = [
    pytest.mark.rotates(2),
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore::UserWarning:(torch|peft|transformers)"),
    pytest.mark.parametrize("device", ["cpu", "webgpu"]),
]

autoload.register()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.last = nn.Linear(16, 6)

    def forward(self, x):
        return self.last(self.first(x).relu())


def settings(rank: int = 4, alpha: int = 8, targets: str = "first last"):
    return peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets.split(), init_lora_weights=False
    )


class Pair:
    """A compiled model and its copy, which runs eagerly on the CPU."""

    def __init__(self, model: Any, device: str, cache: str | None = None) -> None:
        self.on_cpu, self.model = copy.deepcopy(model).eval(), model.to(device).eval()
        options = None if cache is None else {"cache": cache}
        self.call = torch.compile(self.model, backend="webgpu", options=options)
        self.device = device

    def both(self, do: Any) -> None:
        for model in (self.on_cpu, self.model):
            do(model)

    def check(self, disabled: bool = False) -> tuple[int, int]:
        """Compares results; how many graphs and kernels were compiled for it."""
        x = torch.randn(5, 12)
        dynamo_counters.clear()
        counters.reset()
        with torch.no_grad(), self.model.disable_adapter() if disabled else nullcontext():
            found = self.call(x.to(self.device)).cpu()
        with torch.no_grad(), self.on_cpu.disable_adapter() if disabled else nullcontext():
            expected = self.on_cpu(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return dynamo_counters["stats"]["unique_graphs"], counters.kernels_compiled


@pytest.fixture
def traced(monkeypatch):
    """Graphs that AOTAutograd traced."""
    found = []
    original = aot.aot_module_simplified

    def counting(module: Any, *arguments: Any, **keywords: Any) -> Any:
        found.append(module)
        return original(module, *arguments, **keywords)

    monkeypatch.setattr(aot, "aot_module_simplified", counting)
    plan_cache.clear()
    yield found
    plan_cache.clear()


def test_a_swap_finds_the_plan_of_the_adapter_before(device, traced, tmp_path):
    model = peft.get_peft_model(Model(), settings(), adapter_name="a")
    model.add_adapter("b", settings())
    model.add_adapter("c", settings(rank=6))
    model.set_adapter("a")  # other lists of names than after the first adapter was made
    pair = Pair(model, device, str(tmp_path))
    pair.check()
    assert len(traced) == 1
    pair.both(lambda model: model.set_adapter("b"))
    assert pair.check() == (1, 0)  # Dynamo traces it: names are in its guards
    assert len(traced) == 1
    pair.both(lambda model: model.set_adapter("c"))
    assert pair.check()[0] == 1
    assert pair.check(disabled=True)[0] == 1
    for name in "abc":
        pair.both(lambda model, name=name: model.set_adapter(name))
        assert pair.check() == (0, 0)
    assert pair.check(disabled=True) == (0, 0)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_hotswap_compiles_nothing(prepared, device, tmp_path):
    adapters = {"a": settings(), "b": settings()}
    if prepared:  # other ranks, factors and layers
        adapters |= {"c": settings(6), "d": settings(4, 32), "e": settings(targets="last")}
    base = Model()
    for name, config in adapters.items():
        peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path / name)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    if prepared:
        hotswap.prepare_model_for_compiled_hotswap(model, target_rank=6)
    pair = Pair(model, device)
    pair.check()
    for name in (*adapters, "a"):
        pair.both(
            lambda model, name=name: hotswap.hotswap_adapter(
                model, str(tmp_path / name), adapter_name="default", torch_device="cpu"
            )
        )
        assert pair.check() == (0, 0)


def test_merged_adapters_and_changed_ones_are_not_stale(device):
    model = peft.get_peft_model(Model(), settings(), adapter_name="a")
    pair = Pair(model, device)
    pair.check()
    pair.both(lambda model: model.merge_adapter())
    pair.check()
    pair.both(lambda model: model.unmerge_adapter())
    assert pair.check() == (0, 0)

    @torch.no_grad()
    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)

    pair.both(change)
    assert pair.check() == (0, 0)
    merged, expected = pair.model.merge_and_unload(), pair.on_cpu.merge_and_unload()
    x = torch.randn(5, 12)
    with torch.no_grad():
        found = torch.compile(merged, backend="webgpu")(x.to(device))
        torch.testing.assert_close(found.cpu(), expected(x), rtol=1e-4, atol=1e-4)
