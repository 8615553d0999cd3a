from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torch_webgpu_compile.capture.attention import operators
from torch_webgpu_compile.capture.graph import patterns
from torch_webgpu_compile.torch_ops import attention_ops


def inputs(q_shape, k_shape, v_shape, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (q_shape, k_shape, v_shape)]


def make_mask(kind, batch, heads, queries, keys):
    torch.manual_seed(1)
    shape = {
        "rows": (queries, keys),
        "padding": (batch, 1, 1, keys),
        "full": (batch, heads, queries, keys),
        "heads": (1, heads, queries, keys),
    }
    name, _, dtype = kind.partition("-")
    mask = torch.randn(shape[name])
    if dtype == "bool":
        mask = mask > -0.5
        mask[..., 0] = True
        return mask
    return mask.requires_grad_()


CASES = [
    # query heads, key heads, queries, keys, size, value size, mask, causal
    (4, 4, 8, 8, 16, 16, None, False),
    (4, 4, 8, 8, 16, 16, None, True),
    (4, 4, 5, 9, 16, 16, None, True),
    (4, 4, 9, 5, 16, 24, None, True),
    (4, 2, 8, 8, 16, 16, None, True),
    (6, 2, 3, 7, 8, 8, "full-float", False),
    (4, 1, 8, 8, 16, 16, "padding-bool", False),
    (4, 4, 8, 8, 16, 16, "rows-bool", False),
    (4, 4, 8, 6, 16, 16, "rows-float", False),
    (4, 4, 8, 8, 16, 16, "heads-float", False),
    (2, 2, 1, 8, 16, 16, "padding-float", False),
]


@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradients_are_eagers(case):
    heads, key_heads, queries, keys, size, value_size, kind, causal = case
    q, k, v = inputs(
        (2, heads, queries, size), (2, key_heads, keys, size), (2, key_heads, keys, value_size)
    )
    mask = None if kind is None else make_mask(kind, 2, heads, queries, keys)
    arguments = (q, k, v, mask, 0.0, causal)
    wanted = F.scaled_dot_product_attention(*arguments, enable_gqa=heads != key_heads)
    got = operators.attention(*arguments, enable_gqa=heads != key_heads)
    torch.testing.assert_close(got, wanted)
    leaves = [t for t in (q, k, v, mask) if t is not None and t.requires_grad]
    cotangent = torch.randn_like(wanted)
    for g, w in zip(
        torch.autograd.grad(got, leaves, cotangent),
        torch.autograd.grad(wanted, leaves, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    q, k, v = inputs((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), dtype)
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    got = operators.attention(q, k, v, scale=0.3)
    assert got.dtype == dtype
    # The reference itself rounds to half precision more than once: allow a few units in the last
    # place.
    torch.testing.assert_close(got, wanted, atol=4e-3, rtol=2e-2)
    cotangent = torch.randn_like(wanted)
    for g, w in zip(
        torch.autograd.grad(got, (q, k, v), cotangent),
        torch.autograd.grad(wanted, (q, k, v), cotangent),
        strict=True,
    ):
        torch.testing.assert_close(g, w, atol=2e-2, rtol=2e-2)


def test_a_row_without_keys_is_zero():
    q, k, v = inputs((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    got = operators.attention(q, k, v, mask)
    assert (got[:, :, 2] == 0).all()
    torch.testing.assert_close(got, wanted)
    for gradient in torch.autograd.grad(got.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_the_result_is_laid_out_as_pytorchs():
    q, k, v = inputs((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16))
    for query in (q, torch.randn(2, 8, 4, 16).transpose(1, 2)):
        wanted = F.scaled_dot_product_attention(query, k, v)
        assert operators.attention(query, k, v).stride() == wanted.stride()


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank):
    shape = (2, 3, 2, 6, 8)[5 - rank :]
    q, k, v = inputs(shape, shape, shape)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(operators.attention(q, k, v, is_causal=True), wanted)


@pytest.mark.parametrize("shape", [(6, 6), (3, 6, 6), (3, 1, 6)])
def test_masks_of_three_dimensional_attention(shape):
    q, k, v = inputs((3, 6, 8), (3, 6, 8), (3, 6, 8))
    mask = torch.randn(shape)
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(operators.attention(q, k, v, mask), wanted)


def test_batches_that_broadcast():
    q, k, v = inputs((1, 2, 4, 8), (3, 2, 5, 8), (3, 2, 5, 8))
    wanted = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(operators.attention(q, k, v), wanted)


def test_dropout_keeps_the_expectation():
    q, k, v = inputs((1, 2, 64, 8), (1, 2, 64, 8), (1, 2, 64, 8))
    torch.manual_seed(0)
    mean = torch.stack([operators.attention(q, k, v, dropout_p=0.2) for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(q, k, v), atol=0.08, rtol=0.1)


@pytest.mark.slow
def test_operator_is_consistent_with_its_fake():
    q, k, v = inputs((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))
    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    torch.library.opcheck(attention_ops.attention, (q, k, v, bias, True, 0.25))
    torch.library.opcheck(attention_ops.attention, (q, k, v, None, False, 0.25))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, "rows", "padding", "both"])
def test_encoder_layer_is_eagers(norm_first, mask):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 32, batch_first=True, norm_first=norm_first, activation="gelu"
    ).eval()
    x = torch.randn(2, 6, 16)
    rows = torch.ones(6, 6, dtype=torch.bool).triu(1) if mask in ("rows", "both") else None
    padding = None
    if mask in ("padding", "both"):
        padding = torch.zeros(2, 6, dtype=torch.bool)
        padding[1, 4:] = True

    def run(x):
        return layer(x, src_mask=rows, src_key_padding_mask=padding)

    rewritten = []

    def backend(module, _):
        rewritten.append(patterns.replace_calls(module))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(x)
        got = torch.compile(run, backend=backend, fullgraph=True)(x)
    assert sum(rewritten) == 1
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_is_eagers(need_weights):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 16)

    def run(x):
        return module(x, x, x, need_weights=need_weights)

    def backend(gm, _):
        patterns.replace_calls(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        wanted = run(x)
        got = torch.compile(run, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, wanted)
