"""Attention end to end against eager, forward and backward, one kernel for the forward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiling import native
from torch_webgpu_compile import counters, explain

pytestmark = [pytest.mark.rotates(12), pytest.mark.usefixtures("fresh")]


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "longer keys": {"keys": 19, "causal": True},
    "longer queries": {"queries": 19, "keys": 6, "causal": True},
    "one query": {"queries": 1},
    "grouped": {"heads": 6, "key_heads": 2, "causal": True},
    "multi query": {"key_heads": 1},
    "bool mask": {"mask": torch.bool},
    "float mask": {"mask": torch.float32},
    "value size": {"value_size": 24},
    "odd sizes": {"size": 13, "value_size": 7, "queries": 5, "keys": 3},
    "large heads": {"size": 128, "value_size": 128},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, dtype):
    shape = {"heads": 4, "queries": 9, "keys": 9, "size": 16} | CASES[case]
    heads, key_heads = shape["heads"], shape.get("key_heads", shape["heads"])
    size, value_size = shape["size"], shape.get("value_size", shape["size"])
    causal = shape.get("causal", False)
    q = torch.randn(2, heads, shape["queries"], size, dtype=dtype, requires_grad=True)
    k = torch.randn(2, key_heads, shape["keys"], size, dtype=dtype, requires_grad=True)
    v = torch.randn(2, key_heads, shape["keys"], value_size, dtype=dtype, requires_grad=True)
    mask = None
    if "mask" in shape:
        mask = torch.randn(2, 1, shape["queries"], shape["keys"])
        mask = mask > -1 if shape["mask"] is torch.bool else mask.to(dtype)

    def f(q, k, v, mask):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=heads != key_heads
        )

    run = native(f)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    wanted = f(*exact, wide)
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype is torch.float32 else {
        "atol": 3e-2, "rtol": 3e-2
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(run(q, k, v, mask).double(), wanted, **tolerance)
    got = run(q, k, v, mask)
    torch.testing.assert_close(got.double(), wanted, **tolerance)
    cotangent = torch.randn_like(got)
    for g, w in zip(
        torch.autograd.grad(got, (q, k, v), cotangent),
        torch.autograd.grad(wanted, exact, cotangent.double()),
        strict=True,
    ):
        torch.testing.assert_close(g.double(), w, **tolerance)


def test_the_forward_is_one_kernel():
    q = torch.randn(1, 4, 32, 16)
    mask = torch.randn(32, 32) > 0

    def f(q, mask):
        return F.scaled_dot_product_attention(q, q * 2, q + 1, mask)

    with torch.no_grad():
        report = explain(f, q, mask)
    assert report.dispatch_count == 1


def test_a_row_without_keys_is_zero():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False

    def f(q, mask):
        return F.scaled_dot_product_attention(q, q, q, mask)

    got, wanted = native(f)(q, mask), f(q, mask)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), q), torch.autograd.grad(wanted.sum(), q)
    )


def test_dynamic_lengths():
    def f(q):
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    run = native(f, dynamic=True)
    counters.reset()
    for length in (5, 17, 33):
        q = torch.randn(2, 3, length, 8)
        torch.testing.assert_close(run(q), f(q))
    assert counters.plans_compiled == 1


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_transformer_encoder(train, padding):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(train)
    x = torch.randn(2, 6, 16)
    mask = None
    if padding:
        mask = torch.zeros(2, 6, dtype=torch.bool)
        mask[1, 4:] = True

    def f(x):
        return model(x, src_key_padding_mask=mask)

    run = native(f)
    with torch.set_grad_enabled(train):
        got, wanted = run(x), f(x)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
        if train:
            parameters = list(model.parameters())
            for g, w in zip(
                torch.autograd.grad(got.square().sum(), parameters),
                torch.autograd.grad(wanted.square().sum(), parameters),
                strict=True,
            ):
                torch.testing.assert_close(g, w, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length", [40, 130])
def test_causal_mask_of_several_documents(length):
    """The kernel knows that the mask is causal, and that it says more."""

    def f(q, k, v, ids):
        position = torch.arange(length)
        mask = (position <= position.unsqueeze(1)) & (ids == ids.unsqueeze(1))
        return F.scaled_dot_product_attention(q, k, v, mask)

    q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
    ids = torch.arange(length) // 33
    got = torch.compile(f, backend="webgpu", dynamic=False)(q, k, v, ids)
    torch.testing.assert_close(got, f(q, k, v, ids))


def test_a_head_size_that_tracing_found():
    """Of a symbolic width, as after a graph break in a layer: ``width // (width // 8)`` is 8."""

    def f(query, keys):
        key = keys.view(2, 12, -1, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key)

    query = torch.randn(2, 2, 12, 8, requires_grad=True)
    keys = torch.randn(2, 12, 16, requires_grad=True)
    torch._dynamo.maybe_mark_dynamic(keys, 2)
    got = native(f)(query, keys)
    expected = f(query, keys)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    grads = (
        torch.autograd.grad(result.square().sum(), (query, keys)) for result in (got, expected)
    )
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
