"""Floats of 8 bits without an adapter: `ir.float8` and the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.float8_samples import DTYPES, assert_same, codes, floats
from tests.harness import check
from torch_webgpu_compile.ir import float8
from torch_webgpu_compile.torch_ops.dtypes import dtype_of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    ours = dtype_of(dtype)
    assert ours is not None
    decoded = float8.decode(codes(dtype).view(torch.uint8).numpy(), ours)
    assert_same(torch.from_numpy(decoded), codes(dtype).float())
    x = floats(dtype)
    encoded = torch.from_numpy(float8.encode(x.numpy(), ours)).view(dtype)
    assert_same(encoded, x.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interpreted(dtype: torch.dtype) -> None:
    x = floats(dtype)
    check(lambda x: x.to(dtype).float() * 3, x)
    check(lambda x: torch.full_like(x, 0.3, dtype=dtype).float() + x, x)
    check(lambda x: x.view(dtype).float(), torch.arange(256, dtype=torch.uint8))
    finite = x.nan_to_num(1.0).clamp(-240, 240)
    check(lambda x: x.to(dtype).view(torch.uint8), finite)
