"""Floats to convert to 8 bits: every value of a dtype, what lies between two, and the special."""

from __future__ import annotations

import torch

DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def codes(dtype: torch.dtype) -> torch.Tensor:
    """All 256 elements of a dtype."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def floats(dtype: torch.dtype) -> torch.Tensor:
    """float32 (n,): the values of ``dtype``, all ties, their neighbours, and what is too large."""
    values = codes(dtype).float()
    finite = values[values.isfinite()].unique()
    ties = (finite[1:] + finite[:-1]) / 2
    largest = float(finite.max())
    step = largest - float(finite[-2])
    beyond = [largest + k * step / 4 for k in range(9)] + [1e9, 3.4e38, float("inf")]
    tiny = float(finite[finite > 0].min())
    small = [tiny * k / 8 for k in range(17)] + [1e-30, 1e-40]
    special = torch.tensor([*beyond, *small, float("nan")])
    found = torch.cat([finite, ties, special, -special])
    infinity = torch.tensor(float("inf"))
    near = [found, torch.nextafter(found, infinity), torch.nextafter(found, -infinity)]
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(2001, generator=generator) * torch.logspace(-6, 5, 2001)
    found = torch.cat([*near, random])
    if torch.tensor(1e9).to(dtype).float().isnan() and dtype is torch.float8_e4m3fn:
        found = found.clamp(-largest, largest)  # before PyTorch 2.13, what is too large was NaN
    return found


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Of the same dtype and bits, but for those of NaN."""
    assert got.dtype is expected.dtype
    got, expected = got.cpu(), expected.cpu()
    if got.dtype.is_floating_point and got.dtype.itemsize == 1:
        is_nan = expected.float().isnan()
        assert torch.equal(got.float().isnan(), is_nan)
        got, expected = got.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan]
    assert torch.equal(got, expected) or torch.equal(
        torch.nan_to_num(got, 123.5), torch.nan_to_num(expected, 123.5)
    )
