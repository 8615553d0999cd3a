"""Views, joins and creation: no node for a view, masks instead of copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.harness import capture, check, lower_checked
from torch_webgpu_compile.ir.nodes import Pointwise

F = torch.nn.functional
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(6, 4),
    "merge": lambda x: x.reshape(-1),
    "split a dimension": lambda x: x.view(2, 3, 2, 2),
    "regroup": lambda x: x.view(3, 2, 4),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute, merge": lambda x: x.permute(1, 0, 2).reshape(3, 8),
    "transpose, split": lambda x: x.transpose(1, 2).reshape(2, 2, 6),
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "slice": lambda x: x[:, 1:3, ::2],
    "negative slice": lambda x: x[:, -2:, :-1],
    "select": lambda x: x[1, :, -1],
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "roll flat": lambda x: x.roll(5),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (3, 2), 1),
    "split": lambda x: x.split(2, 2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "chunk": lambda x: x.chunk(3, 1)[1],
    "movedim": lambda x: x.movedim(0, -1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(4, 2, 3), 2),
    "view dtype": lambda x: x.view(torch.int32),
    "view smaller dtype": lambda x: x.view(torch.int16),
    "view bytes": lambda x: x.view(torch.uint8)[..., 1:],
    "view larger dtype": lambda x: x.view(torch.int64),
    "view words as halves": lambda x: x.view(torch.int64).view(torch.bfloat16),
    "view bytes as floats": lambda x: x.view(torch.int8).view(torch.float16),
    "negative view": lambda x: torch._neg_view(x),
}
JOINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cat": lambda x: torch.cat([x, x + 1, x[:, :1]], 1),
    "cat last": lambda x: torch.cat([x, x[..., :1]], -1),
    "cat with empty": lambda x: torch.cat([x[:, :0], x, torch.empty(0)], 1),
    "cat promotes": lambda x: torch.cat([x, (x > 0)], 0),
    "stack": lambda x: torch.stack([x, x * 2], -1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 3), value=7.0),
    "pad crops": lambda x: F.pad(x, (-1, 2)),
    "pad reflect": lambda x: F.pad(x, (1, 2), mode="reflect"),
    "pad replicate": lambda x: F.pad(x, (1, 2), mode="replicate"),
    "pad circular": lambda x: F.pad(x, (1, 2), mode="circular"),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2] * 2, 1, 1, 3),
    "slice_scatter step": lambda x: x.slice_scatter(x[..., :2] * 2, 2, 1, 4, 2),
    "select_scatter": lambda x: x.select_scatter(x[0], 0, -1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(torch.ones(2, 3), 1, 1, 2),
    "tril": lambda x: x.tril(1),
    "triu": lambda x: x.triu(-1),
    "in-place slice": lambda x: _fill_slice(x),
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij")[1],
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, 2, 3, 4)),
    "rot90": lambda x: torch.rot90(x, 1, (0, 2)),
    "block_diag": lambda x: torch.block_diag(x[0], x[1]),
}
CREATION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "full": lambda x: torch.full((2, 3), 0.1),
    "full bf16": lambda x: torch.full((2, 3), 0.1, dtype=torch.bfloat16).float(),
    "zeros": lambda x: torch.zeros(2, 3, dtype=torch.int64),
    "ones_like": torch.ones_like,
    "arange": lambda x: torch.arange(7),
    "arange step": lambda x: torch.arange(7, -3, -2),
    "arange float": lambda x: torch.arange(0, 1, 0.25),
    "eye": lambda x: torch.eye(3, 5),
    "linspace": lambda x: torch.linspace(0, 1, 5),
    "scalar": lambda x: torch.tensor(3.0) + x,
    "constant": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]) + x,
}


def sample() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).view(2, 3, 4)


def _fill_slice(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:].mul_(2)
    y[0, 0] = 7
    return y


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    fn = VIEWS[name]
    check(fn, sample())
    check(lambda x: fn(x) + 1 if fn(x).dtype.is_floating_point else fn(x), sample())
    check(lambda x: fn(x * 2), sample())


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_no_node(name: str) -> None:
    graph = lower_checked(capture(lambda x: VIEWS[name](x).contiguous() * 1.0, sample()))
    assert len(graph.nodes) == 1


@pytest.mark.parametrize("name", [n for n in VIEWS if n != "diagonal"])
def test_views_of_dynamic_sizes(name: str) -> None:
    # A diagonal's size is min(rows, columns), which sizes cannot express.
    static = {
        "view": lambda x: x.reshape(-1, 4),
        "split a dimension": lambda x: x.view(x.shape[0], x.shape[1], 2, -1),
        "regroup": lambda x: x.view(x.shape[1], x.shape[0], x.shape[2]),
        "expand": lambda x: x[:, :1].expand(x.shape[0], 5, x.shape[2]),
        "permute, merge": lambda x: x.permute(1, 0, 2).reshape(x.shape[1], -1),
        "transpose, split": lambda x: x.transpose(1, 2).reshape(x.shape[0], 2, -1),
    }
    fn = static.get(name, VIEWS[name])
    check(lambda x: fn(x) * 2, sample(), dynamic=True)


@pytest.mark.parametrize("name", JOINS)
def test_joins(name: str) -> None:
    check(JOINS[name], sample())
    check(JOINS[name], sample().permute(0, 2, 1).contiguous().permute(0, 2, 1))


@pytest.mark.parametrize("name", ["cat", "stack", "pad", "tril"])
def test_joins_of_dynamic_sizes(name: str) -> None:
    check(JOINS[name], sample(), dynamic=True)


@pytest.mark.parametrize("name", CREATION)
def test_creation(name: str) -> None:
    check(CREATION[name], sample())


def test_a_small_mask_has_no_node() -> None:
    def causal(x: torch.Tensor) -> torch.Tensor:
        row, column = torch.arange(4)[:, None], torch.arange(4)
        return torch.where(column <= row, x, float("-inf"))

    graph = lower_checked(capture(causal, torch.randn(4, 4)))
    assert [type(node) for node in graph.nodes] == [Pointwise]
    check(causal, torch.randn(4, 4))


def test_empty_and_zero_dimensional() -> None:
    check(lambda x: torch.cat([x, x]).view(-1, 2), torch.empty(0, 4))
    check(lambda x: x.view(1, 1).expand(2, 3), torch.tensor(2.0))
    check(lambda x: x.flatten(), torch.tensor(2.0))
