"""Integers beyond 32 bits: eager PyTorch and kernels agree, on CPU and device tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import integer_programs
from tests.compiling import compiled

pytestmark = pytest.mark.usefixtures("fresh")


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 30),
    n=st.sampled_from((5, 50_001, 70_000)),
    dynamic=st.booleans(),
    device=st.sampled_from(("cpu", "webgpu")),
)
def test_random_programs(seed, n, dynamic, device):
    text, run = integer_programs.program(seed)
    args = integer_programs.inputs(n, seed)
    wanted = run(*args)
    torch._dynamo.reset()
    got = compiled(run, dynamic=dynamic)(*(x.to(device) for x in args))
    assert not (wrong := integer_programs.differences(text, got, wanted)), wrong


def of_sizes(x):
    n = x.shape[0]
    exact = torch.full((3,), n * n, device=x.device), torch.scalar_tensor(n * n, device=x.device)
    return (
        *exact,
        x * (n * n),
        x / (n * n),
        x + n * 30_000,
        x < n * n,
        x.long() + n * n * n,
        x / math.sqrt(n * 7.0),
        torch.linspace(1, n * n, 5, device=x.device),
        torch.full((2,), n * n / 3, dtype=torch.int64, device=x.device),
        (x * x).sum() / n**2,
    )


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_numbers_of_sizes(device):
    f = compiled(of_sizes, dynamic=True)
    for n in (50_000, 100_003):
        x = torch.ones(n)
        for got, wanted in zip(f(x.to(device)), of_sizes(x), strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=3e-7, atol=0)


def of_a_number(x, n):
    return (
        torch.arange(2, device=x.device) < n,
        x + n,
        x.long() + n,
        x.int() * n,
        torch.arange(3, device=x.device) * n,
        n - torch.arange(3, device=x.device),
        x * (n / 7),
        x.half() * 0 + n % 100,
    )


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_numbers_of_the_caller_are_any_integers(device):
    f = compiled(of_a_number, dynamic=True)
    x = torch.ones(3)
    for n in (7, 5, -3, 2**40, 3, -(2**40) - 1, 2**62 + 3):
        for got, wanted in zip(f(x.to(device), n), of_a_number(x, n), strict=True):
            assert torch.equal(got.cpu(), wanted), (n, got, wanted)


def test_a_number_that_is_compared_first():
    """A guard says that it is positive; it is no size for that."""

    def f(x, n):
        return x + n if n > 1000 else x

    x = torch.arange(4)
    g = compiled(f, dynamic=True)
    for n in (2000, 3000, 1_700_000_000_000):
        assert torch.equal(g(x, n), f(x, n))
