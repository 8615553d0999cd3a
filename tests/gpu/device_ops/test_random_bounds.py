"""Random operators refuse numbers that PyTorch refuses, and stay within their bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device_checks import compare

REFUSED: dict[str, tuple[torch.dtype, Callable[[Tensor], Any]]] = {
    "high": (torch.uint8, lambda t: t.random_(0, 300)),
    "low": (torch.int8, lambda t: t.random_(-200, 5)),
    "none": (torch.int32, lambda t: t.random_(5, 5)),
    "without a float between": (torch.float16, lambda t: t.random_(2049, 2050)),
    "randint": (torch.bool, lambda t: torch.randint(3, t.shape, dtype=t.dtype, device=t.device)),
    "randint_like": (torch.float16, lambda t: torch.randint_like(t, -70000, 7)),
    "uniform": (torch.float32, lambda t: t.uniform_(-3e38, 3e38)),
    "uniform, infinite": (torch.bfloat16, lambda t: t.uniform_(0, torch.inf)),
    "uniform, not a number": (torch.float32, lambda t: t.uniform_(torch.nan, 1)),
    "uniform, the other way": (torch.float32, lambda t: t.uniform_(2, 1)),
    "uniform, of integers": (torch.int64, lambda t: t.uniform_(0, 1)),
    "bernoulli": (torch.float32, lambda t: t.bernoulli_(1.5)),
    "normal": (torch.float32, lambda t: torch.normal(t, -1.0)),
    "normal, of tensors": (torch.float16, lambda t: torch.normal(t, t - 1)),
    "normal, one of which is not a number": (torch.float32, lambda t: torch.normal(0, t / 0)),
    "normal, into a tensor": (torch.float32, lambda t: torch.normal(t, t - 1, out=t.clone())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_numbers(name: str) -> None:
    dtype, call = REFUSED[name]
    compare(lambda device: call(torch.zeros(3, dtype=dtype, device=device)))


def test_numbers_are_checked_in_every_call() -> None:
    x = torch.zeros(4, device="webgpu").uniform_(0, 1).bernoulli_(0.5)
    with pytest.raises(RuntimeError, match="expects to-from"):
        x.uniform_(-3e38, 3e38)
    with pytest.raises(RuntimeError, match="p to be in"):
        x.bernoulli_(-0.5)


@pytest.mark.filterwarnings("ignore:.* is out of bounds .-.2:UserWarning")
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.float16, 0, 32752),  # no float16 between 32736 and it
        (torch.bfloat16, -516, -500),
        (torch.float32, (1 << 25) + 1, (1 << 25) + 9),
        (torch.uint8, 0, 256),
    ],
)
def test_rounding_does_not_leave_the_bounds(dtype: torch.dtype, low: int, high: int) -> None:
    def values(device: str) -> list[float]:
        drawn = torch.empty(20000, dtype=dtype, device=device).random_(low, high)
        return sorted({*drawn.tolist()})

    here, there = values("webgpu"), values("cpu")
    assert low <= here[0] <= here[-1] < high
    if len(there) < 1000:
        assert here == there


def test_floats_that_are_not_held_are_warned_of_each_time() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="to - 1 is out of bounds"):
            torch.empty(3, dtype=torch.float16, device="webgpu").random_(0, 32752)


def test_refused_when_compiled() -> None:
    compiled = torch.compile(lambda t: t.random_(0, 300), backend="webgpu")
    with pytest.raises(RuntimeError, match="to - 1 is out of bounds for unsigned char"):
        compiled(torch.zeros(3, dtype=torch.uint8))


def test_bounds_are_checked_whatever_came_before():
    """The first call decides what is asked of the numbers of later ones."""
    x = torch.zeros(7, device="webgpu").uniform_(-100, 100)
    with pytest.raises(RuntimeError, match="to return a"):
        x.uniform_(3, -1)
