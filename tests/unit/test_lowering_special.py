"""Special functions, in float32 and float64, with the values that they have by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.harness import TARGET, check

FLOAT64 = replace(TARGET, features=TARGET.features | {"shader-f64"})
NUMBERS = torch.cat([torch.linspace(-9, 30, 157), torch.tensor([0.0, 1e-6, 1.5e5])])
OPEN_UNIT = torch.cat([torch.linspace(0.001, 0.999, 99), torch.logspace(-30, -3, 20)])
POSITIVE = torch.cat([torch.linspace(0.01, 20, 99), torch.logspace(-3, 5, 20)])
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "i0": (torch.i0, NUMBERS),
    "i0e": (torch.special.i0e, NUMBERS),
    "i1": (torch.special.i1, NUMBERS),
    "i1e": (torch.special.i1e, NUMBERS),
    "erfcx": (torch.special.erfcx, NUMBERS),
    "log_ndtr": (torch.special.log_ndtr, -NUMBERS),
    "ndtri": (torch.special.ndtri, OPEN_UNIT),
    "ndtr": (torch.special.ndtr, NUMBERS),
    "digamma": (torch.digamma, torch.cat([POSITIVE, -POSITIVE - 0.1])),
    "lgamma": (torch.lgamma, torch.cat([POSITIVE, -POSITIVE[:99] - 0.1])),
    "trigamma": (lambda x: torch.polygamma(1, x), POSITIVE),
    "polygamma 2": (lambda x: torch.polygamma(2, x), torch.cat([POSITIVE, -POSITIVE[:50] - 0.1])),
    "polygamma 5": (lambda x: torch.polygamma(5, x), torch.cat([POSITIVE, -POSITIVE[:50] - 0.1])),
}
# PyTorch's trigamma is 13 terms of a series: 5e-10.
TOLERANCE = {"trigamma": 2e-9}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    fn, x = FUNCTIONS[name]
    check(fn, x, rtol=5e-5, atol=2e-6)
    tolerance = TOLERANCE.get(name, 2e-12)
    check(fn, x.double(), target=FLOAT64, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    fn, _ = FUNCTIONS[name]
    check(fn, torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0]))
    check(fn, torch.empty(0))
    check(fn, torch.tensor(0.25))


def test_integers_become_floats() -> None:
    check(torch.i0, torch.tensor([0, 3, -7]))
    check(lambda x: torch.polygamma(3, x), torch.tensor([1, 3, 70]))


def test_poles() -> None:
    whole = torch.tensor([0.0, -1.0, -2.0, -30.0])
    check(lambda x: torch.polygamma(2, x), whole)
    check(lambda x: torch.polygamma(3, x), whole)
    check(torch.special.ndtri, torch.tensor([0.0, 1.0, -0.1, 1.1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_frexp(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -3.7, math.inf, -math.inf, math.nan, 3e38, 0.5, 6e-8, 1e-40])
    target = FLOAT64 if dtype is torch.float64 else TARGET
    check(torch.frexp, x.to(dtype), target=target, rtol=0, atol=0)
    check(torch.frexp, torch.tensor(10.0, dtype=dtype), target=target, rtol=0, atol=0)
