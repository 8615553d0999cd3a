"""Random operators in kernels: seeds, fresh numbers, one mask for forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compiling import native
from torch_webgpu_compile import explain

pytestmark = pytest.mark.usefixtures("fresh")


def test_numbers_are_fresh_and_seeds_repeat_them():
    f = native(lambda x: torch.rand_like(x) + torch.randn(64))
    x = torch.empty(64)
    torch.manual_seed(7)
    first, second = f(x), f(x)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(f(x), first)
    assert torch.equal(f(x), second)


def test_equal_calls_give_different_numbers():
    a, b = native(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.empty(64))
    assert not torch.equal(a, b)


def test_distributions():
    n = 1 << 17

    def f(x):
        return torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x), torch.randint(9, (n,))

    u, z, b, i = (t.double() for t in native(f)(torch.full((n,), 0.25)))
    for sample, mean, std in (
        (u, 0.5, math.sqrt(1 / 12)),
        (z, 0, 1),
        (b, 0.25, math.sqrt(3) / 4),
        (i, 4, math.sqrt(80 / 12)),
    ):
        assert abs(sample.mean() - mean) < 5 * std / math.sqrt(n)
        assert abs(sample.std() / std - 1) < 0.02


def test_dropout_is_fused_and_needs_no_host():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU())
    report = explain(model, torch.randn(4, 8))
    assert report.fallbacks == ()
    assert report.dispatch_count <= 2


@pytest.mark.parametrize("remake", [False, True])
def test_forward_and_backward_use_one_mask(remake):
    """Also when the backward graph computes the mask again."""

    def dropped(x):
        return nn.functional.dropout(x.exp(), 0.4)

    def f(x):
        return checkpoint(dropped, x, use_reentrant=False) if remake else dropped(x)

    x = torch.randn(2048, requires_grad=True)
    y = native(f)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, y.detach())
    kept = (y != 0).double().mean()
    assert abs(kept - 0.6) < 0.06
    torch.testing.assert_close(y[y != 0], (x.exp() / 0.6)[y != 0])


def test_dropout_in_evaluation_is_the_identity():
    model = nn.Dropout(0.5).eval()
    x = torch.randn(8)
    assert torch.equal(native(model)(x), x)


def test_attention_with_dropout():
    q = torch.randn(2, 4, 8, 16, requires_grad=True)

    def f(q):
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    y = native(f)(q)
    (gradient,) = torch.autograd.grad(y.sum(), q)
    assert gradient.isfinite().all()


def test_dynamic_sizes():
    f = native(lambda x: nn.functional.dropout(x, 0.5), dynamic=True)
    for n in (100, 1000, 333):
        y = f(torch.ones(n))
        assert set(y.unique().tolist()) == {0.0, 2.0}


def test_a_generator_keeps_eagers_numbers():
    generator = torch.Generator().manual_seed(3)
    wanted = torch.rand(5, generator=generator)
    generator.manual_seed(3)
    f = torch.compile(lambda x: x + 1, backend="webgpu")
    torch.testing.assert_close(f(torch.rand(5, generator=generator)), wanted + 1)
