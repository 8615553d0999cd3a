"""Floats of 8 bits on the device and in compiled graphs: PyTorch's conversions, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.float8_samples import DTYPES, assert_same, codes, floats
from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(6)


@pytest.fixture(autouse=True)
def _nothing_on_the_host() -> object:
    before = dict(counters.fallbacks)
    torch._dynamo.reset()
    yield
    assert dict(counters.fallbacks) == before


def both(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> None:
    """Compares eager on the CPU with compiled, and with eager and compiled on the device."""
    expected = function(*arguments)
    on_device = [argument.to("webgpu") for argument in arguments]
    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    assert_same(compiled(*arguments), expected)
    assert_same(compiled(*on_device), expected)
    assert_same(function(*on_device), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_is_loaded(dtype: torch.dtype) -> None:
    both(lambda x: x.float(), codes(dtype))
    both(lambda x: x.float(), codes(dtype)[1::3])  # one at a time, not by words
    both(lambda x: x.to(torch.bfloat16), codes(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stores_round_as_pytorch_does(dtype: torch.dtype) -> None:
    both(lambda x: x.to(dtype), floats(dtype))
    both(lambda x: x.to(dtype)[:-1].reshape(2, -1).t().contiguous(), floats(dtype)[:403])
    both(lambda x: x.to(dtype), floats(dtype).bfloat16())
    both(lambda x: x.to(dtype), torch.arange(-300, 300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_rounded_before_they_are_used(dtype: torch.dtype) -> None:
    both(lambda x: x.to(dtype).float() * 3, floats(dtype))
    both(lambda x: x.to(dtype).view(torch.uint8), floats(dtype).nan_to_num(1.0).clamp(-240, 240))
    both(lambda x: (x + 1).view(dtype).float(), torch.arange(255, dtype=torch.uint8))
    both(lambda x: torch.full_like(x, 0.3, dtype=dtype).float() + x, torch.ones(5))


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_movements(dtype: torch.dtype) -> None:
    x = codes(dtype)[: 9 * 7].reshape(9, 7)
    both(lambda x: torch.cat([x, x[:2]]), x)
    both(lambda x: x.t().contiguous(), x)
    both(lambda x: x[:, 1:4].clone(), x)
    both(lambda x, at: x[at], x, torch.tensor([3, 0, 8]))
    both(lambda x, at: x.index_select(1, at), x, torch.tensor([3, 0, 6]))
    both(lambda x: torch.where(x.float() > 0.01, x, torch.zeros_like(x)), x)
    both(lambda x: torch.stack([x, x]).flatten(), x)
    both(lambda x: x.expand(3, 9, 7).clone(), x)
    device = torch.empty(5, dtype=dtype, device="webgpu").fill_(1.3)
    assert_same(device, torch.empty(5, dtype=dtype).fill_(1.3))
    device = x.to("webgpu")
    device[2:4] = device[5:7].clone()
    expected = x.clone()
    expected[2:4] = x[5:7].clone()
    assert_same(device, expected)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_weight_of_8_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(33, 50, generator=generator)
    scale = weight.abs().amax(1, keepdim=True) / 100
    stored = (weight / scale).to(dtype)
    x = torch.randn(6, 50, generator=generator)

    def linear(x: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, stored.to(x.dtype) * scale)

    expected = linear(x, stored, scale)
    compiled = torch.compile(linear, backend="webgpu", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, stored, scale), expected)
    on_device = [t.to("webgpu") for t in (x, stored, scale)]
    torch.testing.assert_close(compiled(*on_device).cpu(), expected)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("per_row", [False, True])
def test_scaled_products(out: torch.dtype | None, per_row: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator) + 0.5

    a, b = ((random(*sizes) - 1).to(torch.float8_e4m3fn) for sizes in ((16, 32), (48, 32)))
    scales = (random(16, 1), random(1, 48)) if per_row else (random(), random(1))
    bias = None if per_row or out is None else random(48).to(out)
    given = [a, b, *scales] if bias is None else [a, b, *scales, bias]

    def product(a, b, *others):
        return torch._scaled_mm(a, b.t(), *others, out_dtype=out)

    try:
        expected = product(*given).float()
    except RuntimeError as error:
        if "only supports per-tensor scaling for CPU" not in str(error):
            raise
        pytest.skip("this PyTorch has no scales of rows on the CPU to compare with")
    compiled = torch.compile(product, backend="webgpu", fullgraph=True)
    on_device = [tensor.to("webgpu") for tensor in given]
    # Sums in another order are rounded to the neighbour where they lie near a tie.
    near = {"atol": 1e-5, "rtol": {torch.float32: 1e-5, torch.bfloat16: 1e-2}.get(out, 0.13)}
    for function, arguments in ((compiled, given), (compiled, on_device), (product, on_device)):
        torch.testing.assert_close(function(*arguments).float().cpu(), expected, **near)


def test_what_is_not_float8_has_no_scaled_product() -> None:
    x, one = torch.ones(16, 16, device="webgpu"), torch.ones((), device="webgpu")
    with pytest.raises((RuntimeError, ValueError)):
        torch._scaled_mm(x, x.t(), one, one)
    counters.fallbacks.pop("aten._scaled_mm.default", None)  # the host says what is wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_of_floats_of_16_bits(dtype: torch.dtype) -> None:
    x = torch.randn(9, generator=torch.Generator().manual_seed(0))
    both(lambda x: (x * 2).to(dtype).view(torch.int16) + 1, x)
    both(lambda y: (y + 1).view(dtype) * 2, x.to(dtype).view(torch.int16))
