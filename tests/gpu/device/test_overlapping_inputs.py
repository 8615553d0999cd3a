"""Compiled graphs whose inputs are expanded or overlap themselves, at changing storage offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.compiling import compiled
from torch_webgpu_compile.symbolic.sizes import may_overlap

BOTH = pytest.mark.parametrize("place", ["cpu", "webgpu"])
OFFSETS = (1, 0, 64, 3)

VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "row": lambda base, k: base[k : k + 4].expand(7, 4),
    "number": lambda base, k: base[k].expand(5),
    "batch": lambda base, k: base[k : k + 6].view(2, 1, 3).expand(2, 4, 3),
    "windows": lambda base, k: base[k : k + 20].unfold(0, 5, 2),
    "strides (0, 2, 0)": lambda base, k: base.as_strided((3, 4, 2), (0, 2, 0), k),
    "with gaps": lambda base, k: base.as_strided((3, 5, 2), (0, 7, 3), k),
    "size 1": lambda base, k: base.as_strided((1, 5, 2), (3, 1, 0), k),
}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.usefixtures("fresh")
def test_offsets(view: str, dtype: torch.dtype, place: str) -> None:
    base = torch.arange(110).to(dtype)
    there = base.to(place)
    function = compiled(lambda x: x * 2 + 1)
    for offset in OFFSETS:
        wanted = VIEWS[view](base, offset) * 2 + 1
        assert_close(function(VIEWS[view](there, offset)).cpu(), wanted, rtol=0, atol=0)


@BOTH
@pytest.mark.usefixtures("fresh")
def test_changing_sizes(place: str) -> None:
    base = torch.arange(110.0)
    there = base.to(place)
    function = compiled(lambda x: (x * 2).sum(0), dynamic=True)
    for count, offset in ((7, 1), (9, 2), (3, 64)):
        x, y = (b[offset : offset + 4].expand(count, 4) for b in (base, there))
        assert_close(function(y).cpu(), (x * 2).sum(0))
        x, y = (b[offset : offset + 20].unfold(0, 5, count - 1) for b in (base, there))
        assert_close(function(y).cpu(), (x * 2).sum(0))


@BOTH
@pytest.mark.usefixtures("fresh")
def test_beside_an_argument_that_is_changed(place: str) -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        return x * y

    function = compiled(change)
    for offset in OFFSETS[:3]:
        base = torch.arange(110.0)
        there = base.clone().to(place)
        views: list[Any] = [
            (b[70:98].view(7, 4), b[offset:][:4].expand(7, 4)) for b in (base, there)
        ]
        assert_close(function(*views[1]).cpu(), change(*views[0]))
        assert_close(there.cpu(), base)


@BOTH
@pytest.mark.usefixtures("fresh")
def test_training(place: str) -> None:
    base = torch.randn(64)
    there = base.to(place)
    function = compiled(lambda x, w: x * w)
    for offset in OFFSETS[:2]:
        gradients = []
        for call, memory in ((lambda x, w: x * w, base), (function, there)):
            w = torch.ones(4, device=memory.device, requires_grad=True)
            x = memory[offset : offset + 4].expand(7, 4)
            call(x, w).backward(memory[offset + 8 :][:4].expand(7, 4))
            assert w.grad is not None
            gradients.append(w.grad.cpu())
        assert_close(*gradients)


def test_may_overlap() -> None:
    assert not may_overlap((3, 4), (4, 1))
    assert not may_overlap((4, 3), (1, 4))
    assert not may_overlap((3, 1, 4), (4, 0, 1))
    assert not may_overlap((), ())
    assert may_overlap((3, 4), (0, 1))
    assert may_overlap((8, 5), (2, 1))
    assert may_overlap((3, 5, 2), (0, 7, 3))
