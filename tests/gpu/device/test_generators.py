"""Random numbers: seeds, states, and what repeats them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.gpu.device.processes import run
from torch_webgpu_compile import counters
from torch_webgpu_compile.device.eager.host import run_on_host
from torch_webgpu_compile.tensors import generator_devices
from torch_webgpu_compile.tensors.generators import draw_seeds

pytestmark = pytest.mark.rotates(9)

webgpu: Any = torch.webgpu  # type: ignore[attr-defined]


def draw(device: str = "webgpu") -> list[float]:
    return torch.rand(4, device=device).tolist()


def test_manual_seed_repeats_numbers() -> None:
    torch.manual_seed(3)
    first, second = draw(), draw()
    assert first != second
    torch.manual_seed(3)
    assert [draw(), draw()] == [first, second]
    torch.manual_seed(4)
    assert draw() != first


def test_devices_have_generators_of_their_own() -> None:
    torch.manual_seed(3)
    first = draw("webgpu:0")
    assert draw("webgpu:1") == first
    with webgpu.device(1):
        webgpu.manual_seed(5)
        assert webgpu.initial_seed() == 5
    assert webgpu.initial_seed() == 3
    webgpu.manual_seed_all(7)
    assert draw("webgpu:0") == draw("webgpu:1")
    webgpu.seed_all()
    assert draw("webgpu:0") == draw("webgpu:1") != first
    webgpu.seed()
    assert draw("webgpu:0") != draw("webgpu:1")


def test_states() -> None:
    webgpu.manual_seed(1)
    draw()
    state = webgpu.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"
    numbers = draw()
    webgpu.set_rng_state(state)
    assert draw() == numbers
    states = webgpu.get_rng_state_all()
    assert len(states) == 2
    numbers = draw()
    webgpu.set_rng_state_all(states)
    assert draw() == numbers
    with pytest.raises(TypeError, match="ByteTensor"):
        webgpu.set_rng_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="3 bytes"):
        webgpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_fork_rng() -> None:
    torch.manual_seed(2)
    with torch.random.fork_rng(devices=[0], device_type="webgpu"):
        numbers = draw()
        torch.manual_seed(9)
        draw()
    assert draw() == numbers


class Dropped(nn.Module):
    """Two parts with dropout, which may be checkpointed."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.outer, self.kind = nn.Linear(8, 16), nn.Linear(16, 8), kind

    def part(self, x: Tensor) -> Tensor:
        result: Tensor = self.outer(F.dropout(F.gelu(self.inner(x)), 0.5))
        return result

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            if self.kind == "none":
                x = x + self.part(x)
            else:
                x = x + checkpoint(self.part, x, use_reentrant=self.kind == "reentrant")
        return F.dropout(x, 0.1)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_checkpoints_repeat_dropout(kind: str, is_compiled: bool) -> None:
    """Gradients, and the numbers that are drawn later, are those without checkpoints."""
    given = torch.randn(4, 8, device="webgpu")

    def trained(kind: str, seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Dropped(kind).to("webgpu")
        call: Any = torch.compile(model, backend="webgpu") if is_compiled else model
        x = given.clone().requires_grad_()
        torch.manual_seed(seed)
        for _ in range(2):
            call(x).square().sum().backward()
        values = [x, *model.parameters()]
        grads = [value.grad.cpu() for value in values if value.grad is not None]
        return [*grads, torch.rand(3, device="webgpu").cpu()]

    expected = trained("none", 3)
    for found, value in zip(trained(kind, 3), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(trained(kind, 4)[0], expected[0])


def test_compiled_and_eager_dropout_are_the_same() -> None:
    x = torch.ones(64, device="webgpu")
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="webgpu")
    torch.manual_seed(5)
    state = webgpu.get_rng_state()
    first, second = compiled(x).tolist(), compiled(x).tolist()
    assert first != second
    webgpu.set_rng_state(state)
    assert [F.dropout(x, 0.5).tolist(), compiled(x).tolist()] == [first, second]


def test_models_that_are_made_on_the_device_have_the_numbers_of_the_seed() -> None:
    def made() -> list[list[float]]:
        torch.manual_seed(1)
        with torch.device("webgpu"):
            layers = nn.Linear(3, 4), nn.Conv2d(1, 2, 3), nn.Embedding(5, 2), nn.LSTM(2, 3)
            probabilities = torch.rand(4, 6)
            drawn = [
                torch.multinomial(probabilities, 3),
                torch.bernoulli(probabilities),
                torch.poisson(5 * probabilities),
                torch.randperm(9),
                torch.distributions.Normal(probabilities, 1.0).rsample(),
            ]
        weights = [weight for layer in layers for weight in layer.parameters()]
        return [value.detach().flatten().tolist() for value in [*weights, *drawn]]

    assert made() == made()


def test_seeds() -> None:
    def seeds_of(*counts: int) -> torch.Tensor:
        drawn = bytearray().join(draw_seeds(0, count) for count in counts)
        return torch.frombuffer(drawn, dtype=torch.int32).view(-1, 2)

    webgpu.manual_seed(0)
    seeds = seeds_of(1000)
    assert seeds.shape == (1000, 2)
    assert len(set(map(tuple, seeds.tolist()))) == 1000
    bits = (seeds.view(-1, 1) >> torch.arange(32, dtype=torch.int32)) & 1
    assert ((bits.float().mean(0) - 0.5).abs() < 0.06).all()  # 2000 samples: 5 sigma
    webgpu.manual_seed(0)
    assert torch.equal(seeds_of(*[1] * 1000), seeds)
    webgpu.manual_seed(1)
    assert not (seeds_of(1000) == seeds).any(1).all()


def test_generators_on_the_device() -> None:
    generator = torch.Generator(device="webgpu").manual_seed(1)
    assert generator.device == torch.device("webgpu:0")

    def numbers(given: torch.Generator = generator) -> list[float]:
        return torch.rand(4, device="webgpu", generator=given).tolist()

    before = webgpu.get_rng_state()
    first, state, second = numbers(), generator.get_state(), numbers()
    assert first != second
    generator.set_state(state)
    copied = copy.deepcopy(generator)
    assert numbers() == numbers(copied) == second
    assert copied.device == generator.device
    assert torch.equal(webgpu.get_rng_state(), before)


def test_generators_of_another_device_are_refused() -> None:
    """By kernels of either device; operators that run on the host take the device's."""
    generator = torch.Generator("webgpu").manual_seed(1)
    state, numbers = generator.get_state(), torch.full((4,), 0.5)
    for given in (generator, generator.clone_state(), *webgpu.default_generators):
        for draw_with in (torch.bernoulli, torch.poisson, Tensor.normal_):
            with pytest.raises(RuntimeError, match=r"'cpu' device type .* but found 'webgpu'"):
                draw_with(numbers, generator=given)
        drawn = run_on_host(
            torch.ops.aten.poisson.default, (numbers.to("webgpu"),), {"generator": given}
        )
        assert drawn.device == generator.device
    with pytest.raises(RuntimeError, match=r"'webgpu' device type .* but found 'cpu'"):
        torch.poisson(numbers.to("webgpu"), generator=torch.Generator())
    assert torch.equal(numbers, torch.full((4,), 0.5))
    assert not torch.equal(generator.get_state(), state)


def test_where_a_generator_cannot_be_moved_it_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = torch.rand(4, device="webgpu", generator=torch.Generator("webgpu").manual_seed(1))
    monkeypatch.setattr(generator_devices, "_offset", lambda: None)
    generator = torch.Generator("webgpu").manual_seed(1)
    copied = copy.deepcopy(generator)
    for given in (generator, copied, pickle.loads(pickle.dumps(copied.manual_seed(1)))):
        assert given.device == torch.device("webgpu:0")
        assert torch.equal(torch.rand(4, device="webgpu", generator=given), expected)


def test_other_generators_are_those_of_pytorch() -> None:
    assert type(torch.Generator()) is type(torch.Generator("cpu")) is torch._C.Generator
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.Generator(device="webgpu"), torch._C.Generator)
    assert not isinstance(1, torch.Generator)


def test_seed_before_the_device_is_known() -> None:
    code = """
print(torch.rand(2, device="webgpu").tolist())
"""
    seed = "import torch; torch.manual_seed(11)"
    register = "from torch_webgpu_compile.device.autoload import register; register()"
    late = run(f"{seed}\n{register}\n{code}")
    assert late == run(f"torch.manual_seed(11)\n{code}")


def test_another_generator_compiles_nothing_new() -> None:
    def numbers(seed: int) -> Tensor:
        generator = torch.Generator("webgpu").manual_seed(seed)
        return torch.randn(5, device="webgpu", generator=generator)

    numbers(1)
    counters.reset()
    second, third = numbers(2), numbers(3)
    assert counters.plans_compiled == 0
    assert second.tolist() != third.tolist()
