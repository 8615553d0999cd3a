"""Attention on the device, one operator at a time: no scores in memory, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from torch_webgpu_compile import counters

pytestmark = pytest.mark.rotates(9)


def close(got, wanted, dtype=torch.float32):
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_devices_own_attention(dtype, masked):
    tensors = [torch.randn(2, 3, 37, 16, dtype=dtype) for _ in range(3)]
    mask = torch.randn(37, 37, dtype=dtype) if masked else None
    here = [t.to("webgpu").requires_grad_() for t in tensors]
    exact = [t.double().requires_grad_() for t in tensors]
    there = None if mask is None else mask.to("webgpu")
    got = F.scaled_dot_product_attention(*here, there, is_causal=not masked)
    wanted = F.scaled_dot_product_attention(
        *exact, None if mask is None else mask.double(), is_causal=not masked
    )
    close(got.cpu(), wanted, dtype)
    cotangent = torch.randn(got.shape, dtype=dtype)
    for g, w in zip(
        torch.autograd.grad(got, here, cotangent.to("webgpu")),
        torch.autograd.grad(wanted, exact, cotangent.double()),
        strict=True,
    ):
        close(g.cpu(), w, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [None, torch.bool, torch.float])
def test_attention_that_nobody_differentiates_is_one_kernel(kind, dtype):
    q, k, v = (torch.randn(2, heads, 37, 16, dtype=dtype) for heads in (4, 2, 2))
    mask = None if kind is None else (torch.rand(37, 37) > 0.1).to(kind)
    mask = mask.to(dtype) if kind is torch.float else mask
    here = [None if x is None else x.to("webgpu") for x in (q, k, v, mask)]
    F.scaled_dot_product_attention(*here, enable_gqa=True)
    counters.reset()
    got = F.scaled_dot_product_attention(*here, is_causal=mask is None, enable_gqa=True)
    assert counters.dispatches == 1
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in (q, k, v, mask)]
    wanted = F.scaled_dot_product_attention(*exact, is_causal=mask is None, enable_gqa=True)
    close(got.cpu(), wanted, dtype)


def test_modes_see_the_parts_of_what_is_one_call():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen = []
    x = torch.randn(1, 2, 5, 16).to("webgpu")
    with Mode():
        F.scaled_dot_product_attention(x, x, x)
        F.layer_norm(x, (16,))
    fused = "_scaled_dot_product_fused_attention_overrideable"
    assert seen == [fused, "native_layer_norm"]


def test_the_devices_dropout_is_that_of_its_gradient():
    q, k, v, c = (torch.randn(2, 3, 37, 16).to("webgpu") for _ in range(4))
    v.requires_grad_()
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(y, F.scaled_dot_product_attention(q, k, v))
    # The result is linear in the values, if the same weights are kept.
    (gradient,) = torch.autograd.grad((y * c).sum(), v)
    close((gradient * v).sum().cpu(), (y * c).sum().cpu())


def test_the_devices_attention_stores_no_scores():
    q = torch.randn(1, 4, 256, 8).to("webgpu").requires_grad_()
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
    torch.webgpu.synchronize()
    torch.webgpu.reset_peak_memory_stats()
    before = torch.webgpu.memory_allocated()
    F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
    torch.webgpu.synchronize()
    assert torch.webgpu.max_memory_allocated() - before < 4 * 4 * 256 * 256


def test_a_mask_of_bools_becomes_a_bias_in_the_dtype_of_the_query():
    q, mask = torch.randn(1, 1, 256, 8), torch.rand(1, 1, 256, 1024) < 0.7
    k = torch.randn(1, 1, 1024, 8)
    wanted = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    half, keys, given = q.half().to("webgpu"), k.half().to("webgpu"), mask.to("webgpu")
    torch.webgpu.synchronize()
    torch.webgpu.reset_peak_memory_stats()
    before = torch.webgpu.memory_allocated()
    result = F.scaled_dot_product_attention(half, keys, keys, attn_mask=given)
    torch.webgpu.synchronize()
    assert torch.webgpu.max_memory_allocated() - before < 3 * mask.numel()
    # Query, keys and result have the 11 bits of float16.
    torch.testing.assert_close(result.float().cpu(), wanted, atol=1e-2, rtol=1e-2)


def test_plain_attention_on_request_has_a_second_derivative():
    q = torch.randn(1, 2, 5, 8).to("webgpu").requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, q, q)
    (first,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q)
    here = q.detach().cpu().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(here, here, here)
    (first,) = torch.autograd.grad(y.sum(), here, create_graph=True)
    (wanted,) = torch.autograd.grad(first.square().sum(), here)
    close(second.cpu(), wanted)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 2, 3, 5, 8), (1, 2, 5, 300)])
@pytest.mark.parametrize("mask", [None, torch.ones(5, 5, dtype=torch.bool).tril()])
def test_what_has_no_fused_kernel(shape, mask):
    q = torch.randn(shape)
    masked = None if mask is None else mask.to("webgpu")
    here = q.to("webgpu").requires_grad_()
    q.requires_grad_()
    got, wanted = (
        F.scaled_dot_product_attention(here, here, here, masked),
        F.scaled_dot_product_attention(q, q, q, mask),
    )
    close(got.cpu(), wanted)
    found = torch.autograd.grad(got.sum(), here)[0]
    close(found.cpu(), torch.autograd.grad(wanted.sum(), q)[0])


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2, 4, 8), torch.float32), ((2, 3, 4, 8), torch.float64)]
)
def test_boolean_masks_of_attention_that_is_not_fused(sizes, dtype):
    q, k = (torch.randn(*sizes[:-2], length, 8, dtype=dtype) for length in (4, 6))
    mask = torch.rand(4, 6) > 0.5
    mask[0] = False  # a row without keys is 0
    wanted = F.scaled_dot_product_attention(q, k, k, mask)
    got = F.scaled_dot_product_attention(*(t.to("webgpu") for t in (q, k, k, mask)))
    close(got.cpu(), wanted)


_IS_DESCRIBED = torch._C._dispatch_has_kernel_for_dispatch_key(
    "aten::_scaled_dot_product_fused_attention_overrideable_backward", "Meta"
)


@pytest.mark.parametrize("dropout", [0.0, 0.5] if _IS_DESCRIBED else [0.0])  # not in PyTorch 2.11
def test_other_compilers_may_keep_all_that_attention_gives(dropout):
    q = torch.randn(2, 3, 4, 8, device="webgpu", requires_grad=True)
    attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    y = attend(q, q, q, dropout_p=dropout)
    (gradient,) = torch.autograd.grad(y.sum(), q)
    if not dropout:
        (wanted,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q)
        close(gradient.cpu(), wanted.cpu())
