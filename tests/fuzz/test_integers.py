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


def of_wide_products(x):
    n = x.shape[0]
    i = torch.arange(n, device=x.device)
    w = x.int()
    return (
        i * 2**31,
        torch.minimum(i * 2**31, x),
        w.long() * 2**31,
        w.long() % (2**40 + 3) + 7 > 5,
        (i + 2**32 + 2**31).int(),
        (i * 2**31).int(),
        (i * n) // 2**33 // 2**33,
        ((i - 7) // 2**40) // 2**40,
        (x // n**2) // n**2,
        ((i - 7) * n) // 2**33 % (n * n),
        i // 2**33 * n * (2**53 + 1),
        i * (2**31 - 1) % 7,
    )


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_factors_and_divisors_that_only_64_bits_hold(dynamic, device):
    """2³¹ times a widened integer, and its remainders, are wrong on NVIDIA if it may be seen."""
    f = compiled(of_wide_products, dynamic=dynamic)
    for n in (5, 65_536):  # n⁴ is 2⁶⁴
        x = torch.arange(n) * 4001 - 9000
        for got, wanted in zip(f(x.to(device)), of_wide_products(x), strict=True):
            assert torch.equal(got.cpu(), wanted), (n, got, wanted)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_sizes_at_which_numbers_pass_32_bits(device):
    """The same kernels until then, others from then on."""

    def f(x):
        return x[:, 0] + torch.arange(x.shape[0], device=x.device) + x.shape[1] * 4

    g = compiled(f, dynamic=True)
    x = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for rows, columns in ((2, 5), (3, 2**30), (2, 6)):
        expanded = x.expand(rows, columns)
        assert torch.equal(g(expanded).cpu(), f(expanded).cpu())
