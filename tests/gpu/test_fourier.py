"""Fourier transforms end to end against float64, at the accuracy of PyTorch's own in float32."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compiling import native
from torch_webgpu_compile import counters, explain

pytestmark = [pytest.mark.rotates(12), pytest.mark.usefixtures("fresh")]

LENGTHS = [*range(1, 33), 35, 37, 48, 49, 61, 63, 64, 97, 128, 243, 625, 1000, 1009, 1024, 2048]
LONG = [4096, 6000, 8192, 65537, 1 << 17]


def check(fn, *args, numbers):
    """Compares with float64; ``numbers`` of a row determine a result."""
    torch._dynamo.reset()
    got = native(fn)(*args)
    compare(got, fn(*(a.double() for a in args)), numbers)


def compare(got, wanted, numbers):
    assert got.dtype is torch.float32
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    error = (got - wanted).norm() / wanted.norm().clamp_min(1e-30)
    assert error <= 1e-7 * (1 + math.log2(numbers)), error


def rows_of(n):
    """Rows that fill no workgroup."""
    return torch.randn(3 if n < 4096 else 1, n, 2)


@pytest.mark.parametrize("n", [*LENGTHS, *LONG])
def test_lengths(n):
    x = rows_of(n)

    def both(x):
        there = torch.ops.webgpu.fft(x, [1], True, 1.0)
        return there, torch.ops.webgpu.fft(x, [1], False, 1 / n)

    for got, wanted in zip(native(both)(x), both(x.double()), strict=True):
        compare(got, wanted, n)


@pytest.mark.parametrize("n", [*range(1, 17), 31, 37, 64, 97, 1000, 1009, 2048, *LONG])
def test_real_lengths(n):
    x = rows_of(n)

    def real(x):
        there = torch.ops.webgpu.rfft(x[..., 0], [1], 0.5)
        return there, torch.ops.webgpu.irfft(x[:, : n // 2 + 1], [1], n, 0.5)

    for got, wanted in zip(native(real)(x), real(x.double()), strict=True):
        compare(got, wanted, n)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (2, 0), (0, 1, 2)])
@pytest.mark.parametrize("shape", [(12, 5, 6), (3, 40, 37), (4, 1, 300)])
def test_dimensions(shape, dims):
    x = torch.randn(*shape, 2)
    count = math.prod(shape[dim] for dim in dims)
    last = dims[-1]
    n = shape[last]
    check(lambda x: torch.ops.webgpu.fft(x, dims, True, 0.25), x, numbers=count)
    check(lambda x: torch.ops.webgpu.rfft(x[..., 1], dims, 2.0), x, numbers=count)
    half = x.narrow(last, 0, n // 2 + 1)
    check(lambda x: torch.ops.webgpu.irfft(x, dims, n, 1.0), half, numbers=count)


def test_strides():
    x = torch.randn(2, 24, 6, 10)
    cases = {
        "transposed": lambda x: x.permute(3, 1, 2, 0),
        "real and imaginary apart": lambda x: x.permute(1, 2, 3, 0),
        "steps": lambda x: x[:, ::3].permute(1, 2, 3, 0)[:, 1::2],
        "backwards": lambda x: x.flip(1).permute(1, 2, 3, 0),
        "broadcast": lambda x: x[:, :1].permute(1, 2, 3, 0).expand(4, 6, 10, 2),
    }
    for view in cases.values():
        for dim in range(3):
            check(
                lambda x, view=view, dim=dim: torch.ops.webgpu.fft(view(x), [dim], True, 1.0),
                x,
                numbers=64,
            )


def test_what_is_computed_before_is_in_the_kernel():
    """A window, padding and a conversion cost no kernel of their own."""
    x, window = torch.randn(5, 100).half(), torch.hann_window(100)

    def spectrum(x, window):
        padded = torch.nn.functional.pad(x.float() * window, (10, 18))
        return torch.ops.webgpu.rfft(padded, [1], 1.0)

    report = explain(spectrum, x, window)
    assert report.dispatch_count == 1
    assert not report.fallbacks
    got = native(spectrum)(x, window)
    compare(got, spectrum(x.double(), window.double()), 128)


@pytest.mark.parametrize("n", [16, 1000])
def test_round_trip(n):
    x = torch.randn(4, n)

    def trip(x):
        return torch.ops.webgpu.irfft(torch.ops.webgpu.rfft(x, [1], 1.0), [1], n, 1 / n)

    torch.testing.assert_close(native(trip)(x), x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_batches_of_any_size(dim):
    """One plan for all numbers of rows, of every layout."""

    def transform(x):
        for k in (dim, -1):
            int(x.shape[k])  # a kernel is made for lengths that are numbers
        return torch.ops.webgpu.fft(x, [dim], True, 1.0)

    run = native(transform)
    counters.reset()
    for batch in (3, 7, 64, 2):
        sizes = [batch, batch + 1]
        sizes.insert(dim, 48)
        x = torch.randn(*sizes, 2)
        for other in {0, 1, 2} - {dim}:
            torch._dynamo.mark_dynamic(x, other)
        wanted = torch.ops.webgpu.fft(x.double(), [dim], True, 1.0)
        compare(run(x), wanted, 48)
    assert counters.plans_compiled == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype):
    x = torch.randn(3, 20, 2).to(dtype)
    check(lambda x: torch.ops.webgpu.fft(x, [1], True, 1.0), x, numbers=20)
    check(lambda x: torch.ops.webgpu.rfft(x[..., 0], [1], 1.0), x, numbers=20)


def test_nothing_to_transform():
    for shape in ((0, 8, 2), (3, 0, 2)):
        x = torch.randn(shape)
        got = native(lambda x: torch.ops.webgpu.fft(x, [1], True, 1.0))(x)
        assert got.shape == shape
        torch._dynamo.reset()


def test_infinities_and_nan_stay_in_their_row():
    x = torch.randn(3, 24, 2)
    x[1, 5, 0] = float("nan")
    got = native(lambda x: torch.ops.webgpu.fft(x, [1], True, 1.0))(x)
    assert got[1].isnan().all()
    assert not got[[0, 2]].isnan().any()
