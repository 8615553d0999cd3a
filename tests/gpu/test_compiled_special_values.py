"""NaN, infinities and the sign of zero where drivers would simplify them away."""

from __future__ import annotations

import math

import pytest
import torch

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5, -2.5]
FUNCTIONS = {
    "times 0": lambda x: x * 0.0,
    "times -0": lambda x: -0.0 * x,
    "0 over": lambda x: 0.0 / x,
    "-0 over": lambda x: -0.0 / x,
    "over 0": lambda x: x / 0.0,
    "over -0": lambda x: x / -0.0,
    "minus itself": lambda x: x - x,
    "over itself": lambda x: x / x,
    "minus a computed itself": lambda x: x.abs() - x.abs(),
    "comparisons": lambda x: (x == x, x != x, x <= x, x >= x, x < x, x > x),
    "exp of log": lambda x: x.log().exp(),
    "square of sqrt": lambda x: (x.sqrt() ** 2, x.sqrt() * x.sqrt()),
    "addr of nothing": lambda x: torch.addr(torch.ones(7, 7), x, x, alpha=0),
    "clamp": lambda x: x.clamp(-1, 1),
    "minimum": lambda x: (torch.minimum(x, x.new_ones(())), torch.minimum(x.new_ones(()), x)),
    "power 0": lambda x: x**0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name, dtype):
    torch._dynamo.reset()
    if name == "addr of nothing" and dtype is not torch.float32:
        pytest.skip("its first argument is float32")
    fn = FUNCTIONS[name]
    x = torch.tensor(SPECIAL, dtype=dtype)
    got = torch.compile(fn, backend="webgpu", fullgraph=True)(x)
    wanted = fn(x)
    for g, w in zip(
        torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        torch.testing.assert_close(g, w, equal_nan=True)
        if g.dtype.is_floating_point:
            zero = w == 0
            assert torch.equal(g.signbit()[zero], w.signbit()[zero]), "the sign of zero"


@pytest.mark.parametrize("name", ["log1p", "expm1", "asinh", "atanh", "sinh", "tanh", "erf", "sin"])
def test_small_arguments_keep_their_digits(name):
    x = torch.logspace(-30, -1, 200)
    x = torch.cat([x, -x, torch.linspace(-0.99, 0.99, 99)])
    fn = getattr(torch, name)
    got = torch.compile(fn, backend="webgpu", fullgraph=True)(x)
    torch.testing.assert_close(got, fn(x), rtol=4e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whole_quotients(dtype):
    """GPUs divide to within 2.5 ULP; PyTorch rounds a quotient to 16 bits before it truncates."""

    def divide(a, b):
        return torch.div(a, b, rounding_mode="trunc")

    a = torch.cat([torch.arange(1.0, 400), torch.tensor([math.nan, math.inf, 1000.5])]).to(dtype)
    a, b = a[:, None], torch.cat([a, -a])[None]
    got = torch.compile(divide, backend="webgpu", fullgraph=True)(a, b)
    torch.testing.assert_close(got, divide(a, b), rtol=0, atol=0, equal_nan=True)


def check_equal(fn, *arguments):
    torch._dynamo.reset()
    got = torch.compile(fn, backend="webgpu", fullgraph=True)(*arguments)
    for g, w in zip(got, fn(*arguments), strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_narrow_integers_wrap_before_they_are_stored(dtype):
    """Kernels compute them in 32 bits."""
    x = torch.arange(-300, 300).to(dtype)
    check_equal(lambda x: (x * 3 // 2, (x + 100) > x, (x - 90).long(), -x < 0, (x * x).int()), x)


def test_negative_floats_are_large_unsigned_integers():
    x = torch.tensor([-1.0, -2.5, 0.0, 3.9, 200.0])
    check_equal(lambda x: (x.to(torch.uint8), x.to(torch.uint8).int() + 1), x)


@pytest.mark.parametrize("length", [7, 3000])
def test_of_equal_extremes_the_first_is_found(length):
    x = (torch.arange(5 * length).view(5, length) * 7) % 5
    for dtype in (torch.float32, torch.int32):
        y = x.to(dtype)
        check_equal(lambda y: (y.argmax(1), y.argmin(1), y.argmax(0), (y * 0).argmax()), y)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_floats_that_integers_do_not_hold(dtype):
    """The CPU's answers, of constants, compiled inputs and on the device."""
    torch._dynamo.reset()
    x = torch.tensor([*SPECIAL, 1e20, -1e20, 2.0**31, 300.7])

    def both(x):
        return x.to(dtype), torch.full((9,), math.inf, device=x.device).to(dtype)

    expected = both(x)
    for found in (torch.compile(both, backend="webgpu")(x), both(x.to("webgpu"))):
        assert [value.tolist() for value in found] == [value.tolist() for value in expected]
