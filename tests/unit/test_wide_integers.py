"""Values of integers that 32 bits may not hold: ranges, lowering, kernel text, parameters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import integer_programs
from tests.compilations import TARGET, compile_function
from tests.harness import capture, check, lower_checked, run_graph
from torch_webgpu_compile.codegen.wgsl.indices import narrow_bounds
from torch_webgpu_compile.ir.folding import fold
from torch_webgpu_compile.ir.scalar import Index, Op, apply
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import Dispatch
from torch_webgpu_compile.plan.numbers import HostNumber, number_bits
from torch_webgpu_compile.symbolic.sizes import (
    INT64,
    as_expr,
    evaluate,
    is_less,
    is_nonnegative,
    iteration,
    symbol,
    value_range,
)

I = iteration("i", 100_000)
S = symbol("s", 2)
J = iteration("j", S)


@given(
    st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4),
    st.integers(1, 2**34),
    st.integers(0, 99_999),
    st.integers(2, 2**31 - 1),
)
def test_ranges_hold_all_values(coefficients, divisor, i, s):
    a, b, c, d = coefficients
    inner = I * a + S * b + c
    for expr in (inner, inner // divisor, inner % divisor, I * S * d + inner // divisor, I % S):
        assert evaluate(expr, {"i": i, "s": s}) in value_range(expr)


def test_what_is_computed_in_32_bits():
    assert narrow_bounds(I * 20_000) == ()
    assert narrow_bounds(I * 21_476) is None
    assert narrow_bounds((I * 65_536) // 7) is None  # the quotient would fit
    assert narrow_bounds(J) == ()
    assert narrow_bounds(J * 2 - S) == ()
    assert narrow_bounds(J * 3) == (S * 3 - 3,)
    assert narrow_bounds(J * S) is None
    assert narrow_bounds(symbol("n", INT64[0])) is None


def test_numbers_that_may_be_negative_decide_nothing():
    n = symbol("n", INT64[0])
    assert not is_nonnegative(n)
    assert not is_nonnegative(n * n)
    assert not is_less(as_expr(1), n)
    assert is_nonnegative(n - n)


def test_only_what_int64_holds_becomes_an_index_expression():
    wide = apply("mul", Index(J * (1 << 20)), Index(J))
    assert isinstance(fold(wide), Op)
    assert isinstance(fold(apply("mul", Index(I * (1 << 40)), Index(I))), Op)
    assert fold(apply("mul", Index(I * (1 << 20)), Index(I))) is Index(I * I * (1 << 20))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 30), n=st.sampled_from((5, 40_001)), dynamic=st.booleans())
def test_interpreted_programs(seed, n, dynamic):
    text, run = integer_programs.program(seed)
    args = integer_programs.inputs(n, seed)
    graph = lower_checked(capture(run, *args, dynamic=dynamic), allow_host=True)
    wrong = integer_programs.differences(text, run_graph(graph, args), run(*args))
    assert not wrong, wrong


def kernel_of(function, *args, **options):
    (kernel,) = compile_function(function, *args, **options).plan.kernels
    return kernel.wgsl


def test_kernels_compute_values_in_64_bits_only_where_they_must():
    x = torch.zeros(1000, dtype=torch.int64)
    narrow = kernel_of(lambda x: torch.arange(1000) * 2_000_000 + x, x)
    wide = kernel_of(lambda x: torch.arange(1000) * 3_000_000 + x, x)
    assert "i64(q * 8000000)" in narrow
    assert "3000000li * tw_opaque_i64(i64(q * 4))" in wide
    assert "1099511627776li" in kernel_of(lambda x: torch.arange(1000) + 2**40 + x, x)
    y = torch.zeros(1000)
    assert "i64" not in kernel_of(lambda x: x.masked_fill(torch.arange(1000) > 10, 1.0), y)


def test_positions_that_divide_more_than_32_bits_are_computed_in_64():
    x = torch.zeros(1000)
    assert "i64" not in kernel_of(lambda x: x[(torch.arange(1000) * 2_000_000) % 1000], x)
    for position in (
        lambda i: (i * 3_000_001) % 1000,
        lambda i: (i * 3_000_001) // 3_000_003,
    ):
        wgsl = kernel_of(lambda x, position=position: x[position(torch.arange(1000))], x)
        assert "_i64(" in wgsl, wgsl


def assert_is_kept(plan):
    """A plan is stored and read; what its sizes usually are is known to the compiler alone."""
    stored = json.dumps(serialize.to_json(plan))
    assert json.dumps(serialize.to_json(serialize.from_json(json.loads(stored)))) == stored


def test_sizes_that_kernels_rely_on_are_in_the_plan():
    def causal(x):
        i = torch.arange(x.shape[0])
        return torch.where(i[:, None] + x.shape[1] >= i[None, : x.shape[1]] * 2, x, 0.0)

    plan = compile_function(causal, torch.randn(6, 5), dynamic=True).plan
    assert "i64" not in "".join(kernel.wgsl for kernel in plan.kernels)
    relied_on = {expr for step in plan.steps if isinstance(step, Dispatch) for expr in step.narrow}
    assert relied_on
    assert_is_kept(plan)


def test_numbers_from_the_host():
    def f(x):
        n = x.shape[0]
        return x * (n * n) + 1 / (n * 7.0)

    plan = compile_function(f, torch.randn(6), dynamic=True).plan
    numbers = [p for step in plan.steps for p in step.parameters if isinstance(p, HostNumber)]
    assert numbers
    assert_is_kept(plan)
    square = HostNumber("float", (S * S,))
    third = HostNumber("div", (square, HostNumber("float", (3.0,))))
    for s in (3, 100_003, 2**31 - 1):
        assert number_bits(square, {"s": s}) == bits(s * s)
        assert number_bits(third, {"s": s}) == bits(float(s * s) / 3.0)


def bits(number):
    return int(torch.tensor(number).float().view(torch.int32))


def test_a_gpu_without_64_bit_integers():
    target = replace(TARGET, features=frozenset())

    def floats(x):
        return x * (x.shape[0] * x.shape[0]) + torch.arange(x.shape[0], dtype=torch.float32)

    text = kernel_of(floats, torch.randn(6), dynamic=True, target=target)
    assert "i64" not in text

    def masks(x):
        i = torch.arange(x.shape[0], dtype=torch.int32)
        return torch.where((i.long() * 10**9 > 7 * 10**9).to(x.device), x, 0.0)

    check(masks, torch.randn(10), target=target, allow_host=True)

    def number(x):
        return torch.scalar_tensor(x.shape[0] ** 3 * 10**12 + 1, dtype=torch.int64)

    check(number, torch.randn(101), dynamic=True, target=target, allow_host=True)


def test_int32_wraps_as_eager_does():
    def f(x):
        i = torch.arange(x.shape[0], dtype=torch.int32)
        return (
            i * 100_000 + x,
            i.long().mul(100_000).int() - x,
            (torch.arange(70_000) * 70_000).int(),
        )

    for dynamic in (False, True):
        check(f, torch.ones(70_000, dtype=torch.int32), dynamic=dynamic)


@pytest.mark.parametrize("number", [1e-9, -1e-9, 1e6, 0.1, 257, 65520])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_floats_take_divisors_as_they_have_them(number, dtype):
    x = torch.tensor([1.5, -2.25, 100, 0.0, 3e4, -6e4]).to(dtype)

    def f(x):
        scalar = torch.tensor(number, dtype=torch.float32)
        numbers = torch.remainder(x, number), torch.fmod(x, number), number % x
        return *numbers, torch.remainder(x, scalar), torch.fmod(x, scalar), x ** min(number, 257)

    check(f, x)
