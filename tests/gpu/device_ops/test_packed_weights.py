"""Products with packed int4 and int8 weights: ATen's operators, and that of Int4Tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.compiling import native
from torch_webgpu_compile import counters
from torch_webgpu_compile.torch_ops import int4

pytestmark = [pytest.mark.rotates(3), pytest.mark.usefixtures("fresh")]

aten = torch.ops.aten

N, K, GROUP = 64, 128, 32
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def levels() -> Tensor:
    return torch.randint(0, 16, (N, K), dtype=torch.int32)


def by_group(parameter: Tensor) -> Tensor:
    """(K / GROUP, N) for each element of (N, K)."""
    return parameter.float().t().repeat_interleave(GROUP, 1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().t()).to(x.dtype)


def check(operator, *arguments, wanted: Tensor) -> None:
    """Eager and compiled, of tensors on the device."""
    here = [a.to("webgpu") if isinstance(a, Tensor) else a for a in arguments]
    # Sums of 128 terms of about 8 in another order; of bf16, the result is rounded to 8 bits.
    tolerance = 1e-4 if wanted.dtype is torch.float32 else 2e-2
    for function in (operator, native(lambda *given: operator(*given))):
        torch.testing.assert_close(function(*here).cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert not counters.fallbacks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_int4_with_scales_and_zeros_in_one(rows, dtype):
    q, x = levels(), torch.randn(rows, K).to(dtype)
    both = torch.rand(K // GROUP, N, 2).to(dtype)
    given = ((q[:, ::2] << 4) | q[:, 1::2]).to(torch.uint8).to("webgpu")
    packed = aten._convert_weight_to_int4pack(given, 4)
    assert (packed.shape, packed.dtype) == ((N // 8, K // 64, 32, 2), torch.int32)
    weight = (q - 8) * by_group(both[..., 0]) + by_group(both[..., 1])
    check(aten._weight_int4pack_mm, x, packed, GROUP, both, wanted=product(x, weight))


def test_int4_lies_in_rows():
    """Eight elements in a word, the first in its lowest bits."""
    q = levels()
    given = ((q[:, ::2] << 4) | q[:, 1::2]).to(torch.uint8).to("webgpu")
    words = aten._convert_weight_to_int4pack(given, 8).cpu().view(N, K // 8)
    for element in (0, 1, 7, 8, K - 1):
        assert ((words[:, element // 8] >> (4 * (element % 8))) & 15).equal(q[:, element])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_with_integer_zeros(dtype):
    q, x = levels(), torch.randn(3, K).to(dtype)
    scale, zeros = torch.rand(K // GROUP, N).to(dtype), torch.randint(0, 16, (K // GROUP, N))
    words = (q.view(N, -1, 8) << torch.arange(0, 32, 4)).sum(-1).int()
    weight = (q - by_group(zeros)) * by_group(scale)
    operator = aten._weight_int4pack_mm_with_scales_and_zeros
    check(operator, x, words, GROUP, scale, zeros.char(), wanted=product(x, weight))


@pytest.mark.parametrize("rows", [64, 80])
def test_int4_that_the_cpu_packed(rows):
    q, x = torch.randint(0, 16, (rows, K), dtype=torch.int32), torch.randn(3, K)
    both = torch.rand(K // GROUP, rows, 2)
    packed = aten._convert_weight_to_int4pack_for_cpu(q, 1)
    wanted = aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, both)
    check(aten._weight_int4pack_mm_for_cpu, x, packed, GROUP, both, wanted=wanted)


@pytest.mark.rotates(1)  # nothing else finds its fault
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int4_linear(dtype):
    q, x = levels() - 8, torch.randn(2, 3, K).to(dtype)
    scale, zero = torch.rand(2, K // GROUP, N).to(dtype)
    bias = torch.randn(N).to(dtype)
    packed = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).char()
    weight = q * by_group(scale) + by_group(zero)
    wanted = (product(x.double(), weight) + bias.double()).to(dtype)
    check(int4.linear, x, packed, scale, zero, bias, wanted=wanted)
    here = int4.linear(x, packed, scale, zero, bias)
    # Of float16, elements of up to 16 are rounded to 11 bits.
    tolerance = {"atol": 2e-2, "rtol": 1e-3} if dtype is torch.float16 else {}
    torch.testing.assert_close(here, wanted, **tolerance)


def test_gradient_of_the_input_of_int4_linear():
    q, scale, zero = levels() - 8, *torch.rand(2, K // GROUP, N)
    packed = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).char()
    x = torch.randn(3, K, device="webgpu", requires_grad=True)
    factors = torch.randn(3, N)
    result = int4.linear(x, *(t.to("webgpu") for t in (packed, scale, zero)))
    (result * factors.to("webgpu")).sum().backward()
    weight = q * by_group(scale) + by_group(zero)
    # Sums of 64 terms of about 8 in another order.
    torch.testing.assert_close(x.grad.cpu(), factors @ weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8(dtype):
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8)
    x, scales = torch.randn(3, K).to(dtype), torch.rand(N).to(dtype) / 100
    wanted = product(x, weight.double() * scales.double()[:, None])
    check(aten._weight_int8pack_mm, x, weight, scales, wanted=wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_products_of_bytes_are_exact(dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    left = torch.randint(least, most + 1, (33, 2048)).to(dtype)
    right = torch.randint(-128, 128, (2048, 24)).char()
    try:
        torch._int_mm(left, right)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch takes int8 only: {error}")
    left[0], right[:, 0] = (most if least == 0 else least), -128
    wanted = left.int() @ right.int()
    for function in (torch._int_mm, native(torch._int_mm)):
        assert function(left.to("webgpu"), right.to("webgpu")).cpu().equal(wanted)
    assert not counters.fallbacks


def test_weights_that_do_not_fit_are_refused():
    for weight in (torch.zeros(12, 64), torch.zeros(8, 20)):
        with pytest.raises(RuntimeError, match="expected multiples of"):
            aten._convert_weight_to_int4pack(weight.byte().to("webgpu"), 8)
