"""Attention written out in plain operators on an adapter: results and gradients against eager."""

from __future__ import annotations

import math

import pytest
import torch

from tests import written_forms
from tests.written_forms import ADDED, FORMS, KEPT, LOWEST, padding


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(f, **keywords):
    return torch.compile(
        f, backend="webgpu", fullgraph=True, options={"fallback": "error"}, **keywords
    )


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
    got = (compiled(f) if run is None else run)(*arguments)
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
