"""Attention written out in plain operators on an adapter: results and gradients against eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests import written_forms
from tests.compiling import native
from tests.written_forms import ADDED, FORMS, KEPT, LOWEST, padding
from torch_webgpu_compile import counters

pytestmark = [pytest.mark.rotates(18), pytest.mark.usefixtures("fresh")]


def check(f, *arguments, run=None):
    """Results and gradients as eager's, NaN where it has NaN."""
    leaves = [t for t in arguments if t.requires_grad]
    wanted = f(*arguments)
    # Eager rounds scores and weights to 16 bits, of which weights near 1 and scores near 4 keep 8
    # to 11: the kernels keep them in float32.
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[wanted.dtype]
    close = {"atol": tolerance, "rtol": max(tolerance, 1e-5), "equal_nan": True}
    grad = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    got = (native(f) if run is None else run)(*arguments)
    assert got.dtype is wanted.dtype
    torch.testing.assert_close(got, wanted, **close)
    found = torch.autograd.grad(got, leaves, grad)
    torch.testing.assert_close(found, gradients, **close)


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    check(FORMS[name], *written_forms.tensors(name))


@pytest.mark.parametrize("value", [-math.inf, LOWEST, -1e9, -1e4])
def test_an_added_mask(value):
    mask = torch.where(padding(), 0.0, value)
    check(ADDED["additive"], *written_forms.tensors("additive"), mask)


@pytest.mark.parametrize("name", ADDED)
def test_added_masks(name):
    check(ADDED[name], *written_forms.tensors(name), torch.where(padding(), 0.0, -1e9))


@pytest.mark.parametrize("name", KEPT)
def test_masks_that_replace(name):
    check(KEPT[name], *written_forms.tensors(name), padding())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "joined_heads", "sliced_buffer", "repeated", "chosen"])
def test_16_bits(name, dtype):
    mask = [padding()] if name in KEPT else []
    check((FORMS | KEPT)[name], *written_forms.tensors(name, dtype), *mask)


def documents(rows, columns):
    """What causal attention keeps of documents, and rows without keys."""
    ids = torch.arange(columns) // 50
    keep = (ids[:rows, None] == ids) & torch.ones(rows, columns, dtype=torch.bool).tril()
    keep = keep.repeat(2, 1, 1, 1)
    keep[1, :, 3] = False
    return keep


@pytest.mark.parametrize("value", [-math.inf, -1e9, -1e4, 0.5])
def test_many_tiles(value):
    """Tiles of which a mask leaves nothing, and a row that has weights of them."""
    q, k, v = (torch.randn(2, 2, 133, 16, requires_grad=True) for _ in range(3))
    f = written_forms.filled(value)
    check(f, q, k, v, documents(133, 133))


def test_many_tiles_of_an_added_mask():
    q, k, v = (torch.randn(2, 2, 133, 16, requires_grad=True) for _ in range(3))
    check(ADDED["additive"], q, k, v, torch.where(documents(133, 133), 0.0, LOWEST))


@pytest.mark.parametrize("value", [-math.inf, -1e9])
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_of_many_keys(queries, value):
    q = torch.randn(2, 2, queries, 16)
    k, v = torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 16)
    keep = torch.rand(2, 1, queries, 300) < 0.3
    keep[0, 0, -1] = False  # a row without keys
    f = written_forms.filled(value)
    with torch.no_grad():
        got = native(f)(q, k, v, keep)
    torch.testing.assert_close(got, f(q, k, v, keep), equal_nan=True)


@pytest.mark.parametrize("name", ["filled -inf", "filled -1e4"])
def test_products_that_are_replaced_may_be_nan(name):
    q, k, v = (t.detach() for t in written_forms.tensors(name))
    k[:, :, 2] = math.nan
    k[:, :, 3] = math.inf
    keep = (torch.arange(7) < 2).expand(2, 1, 5, 7)
    with torch.no_grad():
        got = native(KEPT[name])(q, k, v, keep)
    torch.testing.assert_close(got, KEPT[name](q, k, v, keep))
    assert got.isfinite().all()


def test_numbers_that_are_not_finite():
    """Rows of NaN where eager has them."""
    q, k, v = (t.detach() for t in written_forms.tensors("plain"))
    q[0, 0, 0], q[0, 1, 1], k[1, 0, 2] = math.nan, math.inf, -math.inf
    with torch.no_grad():
        got, wanted = native(FORMS["plain"])(q, k, v), FORMS["plain"](q, k, v)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert wanted.isnan().any()


def test_symbolic_sizes():
    f = FORMS["sliced_buffer"]
    run = native(f, dynamic=True)
    counters.reset()
    for length in (5, 9, 40):
        arguments = [torch.randn(2, 2, length, 16, requires_grad=True) for _ in range(3)]
        check(f, *arguments, run=run)
    assert counters.plans_compiled <= 2  # forward and backward, once


def test_a_learned_bias_and_mask():
    def f(q, k, v, bias, keep):
        return ((q @ k.mT) * 0.25 + bias).masked_fill(~keep, -1e9).softmax(-1) @ v

    bias = torch.randn(1, 4, 5, 7, requires_grad=True)
    check(f, *written_forms.tensors("plain"), bias, padding())


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout(p):
    def f(q, k, v):
        return F.dropout((q @ k.mT).softmax(-1), p, training=True) @ v

    q, k = torch.zeros(2, 4, 64, 8), torch.zeros(2, 4, 64, 8)
    v = torch.ones(2, 4, 64, 8, requires_grad=True)
    got = native(f)(q, k, v)
    (grad,) = torch.autograd.grad(got.sum(), v)
    kept = {0.0: (1.0, 0.0), 0.25: (1.0, (0.25 / 0.75 / 64) ** 0.5), 1.0: (0.0, 0.0)}[p]
    rows = got[..., 0]
    # 512 rows, each the mean of 64 numbers that are 0 or 1 / (1 - p).
    assert abs(rows.mean().item() - kept[0]) < 1e-5 + kept[1] / 5
    assert abs(rows.std().item() - kept[1]) < 1e-5 + kept[1] / 5
    torch.testing.assert_close(grad.sum(), got.sum())  # of the same weights
