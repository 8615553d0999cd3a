"""``torch.use_deterministic_algorithms``: the same bits in every run, however it is switched."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compiling import native
from torch_webgpu_compile import counters
from torch_webgpu_compile.device.autoload import register

register()
pytestmark = [pytest.mark.rotates(9), pytest.mark.usefixtures("fresh", "_switched_back")]

ROWS = torch.arange(4000) * 7919 % 41


@pytest.fixture
def _switched_back() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def sums(x: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros(41, 8, device=x.device).index_add(0, rows, x)


def values() -> Tensor:
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(1)) * 1e3


@pytest.mark.parametrize("place", ["cpu", "webgpu", "eager"])
def test_sums_are_repeatable_and_right(place: str) -> None:
    torch.use_deterministic_algorithms(True)
    function = sums if place == "eager" else native(sums)
    device = "cpu" if place == "cpu" else "webgpu"
    x, rows = values().to(device), ROWS.to(device)
    results = [function(x, rows).cpu() for _ in range(6)]
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], sums(values(), ROWS), atol=0.05, rtol=1e-4)
    assert not counters.fallbacks


def test_an_eager_operator_follows_the_switch() -> None:
    x, rows = values().to("webgpu"), ROWS.to("webgpu")
    start = torch.zeros(
        1043, 8, device="webgpu"
    )  # of a class as nowhere else: what is compiled stays
    wanted = F.pad(sums(values(), ROWS), (0, 0, 0, 1002))

    def plans() -> int:
        before = counters.plans_compiled
        torch.testing.assert_close(start.index_add(0, rows, x).cpu(), wanted, atol=0.05, rtol=1e-4)
        return counters.plans_compiled - before

    plans()
    torch.use_deterministic_algorithms(True)
    assert plans() == 1  # another one
    torch.use_deterministic_algorithms(False)
    assert plans() == 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plans() == 0


@pytest.mark.parametrize("place", ["cpu", "webgpu"])
def test_a_backward_graph_is_of_the_kind_that_its_forward_graph_was(place: str) -> None:
    def function(x: Tensor, rows: Tensor) -> Tensor:
        return (x[rows] ** 2).sum()

    x = values()[:41].to(place).requires_grad_()
    rows = ROWS.to(place)
    call = native(function)
    (wanted,) = torch.autograd.grad(function(x, rows), x)

    def plans(forward: bool, backward: bool) -> int:
        before = counters.plans_compiled
        torch.use_deterministic_algorithms(forward)
        loss = call(x, rows)
        torch.use_deterministic_algorithms(backward)
        (found,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(found.cpu(), wanted.cpu(), atol=0.05, rtol=1e-4)
        return counters.plans_compiled - before

    assert plans(False, False) == 2
    assert plans(True, True) == 2
    assert plans(True, False) == 0
    assert plans(False, False) == 0
    with pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        plans(False, True)  # AOTAutograd's own check


class Decoder(nn.Module):
    """Tied embeddings, dropout, attention, and a table of positions that is read by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 16)
        self.places = nn.Embedding(12, 16)
        self.heads = nn.Linear(16, 48)
        self.bags = nn.EmbeddingBag(29, 16, mode="mean")

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.embedding(tokens) + self.places(at), 0.1) + self.bags(tokens)[:, None]
        query, key, value = self.heads(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x @ self.embedding.weight.T


def train(place: str, wrap: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(3)
    model = Decoder().to(place)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    step = wrap(model)
    for k in range(2):
        tokens = (torch.arange(4 * 13) * (7 + k) % 29).view(4, 13).to(place)
        optimizer.zero_grad()
        logits = step(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["cpu compiled", "webgpu compiled", "webgpu eager"])
def test_two_trainings_are_equal(kind: str) -> None:
    torch.use_deterministic_algorithms(True)
    place, how = kind.split()
    first, second = (train(place, native if how == "compiled" else lambda m: m) for _ in range(2))
    for a, b in itertools.zip_longest(first, second):
        assert torch.equal(a, b)


def test_new_memory_is_filled() -> None:
    torch.use_deterministic_algorithms(True)
    made = [
        torch.empty(3, device="webgpu"),
        torch.empty_strided((2, 2), (1, 2), dtype=torch.float16, device="webgpu"),
        torch.ones(2, device="webgpu").new_empty(4, dtype=torch.bfloat16),
        torch.empty_like(torch.ones(2, device="webgpu")),
        native(lambda x: torch.empty(5) + x)(torch.ones(5)),
    ]
    assert all(tensor.isnan().all() for tensor in made)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool):
        largest = 1 if dtype is torch.bool else torch.iinfo(dtype).max
        assert torch.empty(3, dtype=dtype, device="webgpu").tolist() == [largest] * 3
    grown = torch.ones(2, device="webgpu").resize_(4).cpu()
    assert grown[:2].tolist() == [1, 1]
    assert grown[2:].isnan().all()
    try:
        torch.utils.deterministic.fill_uninitialized_memory = False
        before = counters.dispatches
        torch.empty(3, device="webgpu")
        assert counters.dispatches == before
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_numbers_become_tensors_while_a_graph_is_traced() -> None:
    torch.use_deterministic_algorithms(True)
    compiled = torch.compile(
        lambda x: x + torch.as_tensor(x.shape[0], device=x.device), backend="webgpu"
    )
    assert compiled(torch.ones(8).to("webgpu")).tolist() == [9.0] * 8
