"""Random operators in kernels: seeds, fresh numbers, one mask for forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.compiling import native
from torch_webgpu_compile import explain
from torch_webgpu_compile.device.autoload import register

register()
pytestmark = [pytest.mark.rotates(3), pytest.mark.usefixtures("fresh")]
on_devices = pytest.mark.parametrize("device", ["cpu", "webgpu"])


@on_devices
def test_numbers_are_fresh_and_seeds_repeat_them(device):
    f = native(lambda x: torch.rand_like(x) + torch.randn(64, device=device))
    x = torch.empty(64, device=device)
    torch.manual_seed(7)
    first, second = f(x), f(x)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(f(x), first)
    assert torch.equal(f(x), second)


def test_equal_calls_give_different_numbers():
    a, b = native(lambda x: (torch.rand_like(x), torch.rand_like(x)))(torch.empty(64))
    assert not torch.equal(a, b)


@on_devices
def test_distributions(device):
    n = 1 << 17

    def f(x):
        whole = torch.randint(9, (n,), device=device)
        return torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x), whole

    u, z, b, i = (t.cpu().double() for t in native(f)(torch.full((n,), 0.25, device=device)))
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


@on_devices
@pytest.mark.parametrize("remake", [False, True])
def test_forward_and_backward_use_one_mask(remake, device):
    """Also when the backward graph computes the mask again."""

    def dropped(x):
        return nn.functional.dropout(x.exp(), 0.4)

    def f(x):
        return checkpoint(dropped, x, use_reentrant=False) if remake else dropped(x)

    x = torch.randn(2048, device=device, requires_grad=True)
    y = native(f)(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    x, y = x.detach().cpu(), y.detach().cpu()
    torch.testing.assert_close(gradient.cpu(), y)
    kept = (y != 0).double().mean()
    assert abs(kept - 0.6) < 0.06
    torch.testing.assert_close(y[y != 0], (x.exp() / 0.6)[y != 0])


def test_dropout_in_evaluation_is_the_identity():
    model = nn.Dropout(0.5).eval()
    x = torch.randn(8)
    assert torch.equal(native(model)(x), x)


@on_devices
def test_attention_with_dropout(device):
    q = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)

    def f(q):
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    y = native(f)(q)
    (gradient,) = torch.autograd.grad(y.sum(), q)
    assert gradient.isfinite().all()


@on_devices
def test_every_operator(device):
    x = torch.rand(3, 40, device=device)

    def f(x):
        return (
            torch.empty_like(x).uniform_(-1, 1),
            torch.empty_like(x).normal_(),
            torch.empty_like(x).exponential_(),
            torch.empty_like(x).cauchy_(),
            torch.empty_like(x).log_normal_(),
            torch.empty_like(x).geometric_(0.5),
            torch.normal(x, 1.0),
            torch.normal(0.0, 1.0, (4,), device=device),
            torch.rand(4, device=device, dtype=torch.float16),
            torch.randint_like(x, 7),
            torch.randint(-(1 << 40), 1 << 40, (4,), device=device),
            torch.multinomial(x, 5),
            torch.multinomial(x, 5, replacement=True),
            nn.functional.rrelu(x - 0.5, training=True),
            nn.functional.dropout1d(x[None], 0.5),
            nn.functional.alpha_dropout(x, 0.5),
        )

    for got, wanted in zip(native(f)(x), f(x), strict=True):
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert got.isfinite().all()


@on_devices
def test_dynamic_sizes(device):
    f = native(lambda x: nn.functional.dropout(x, 0.5), dynamic=True)
    for n in (100, 1000, 333):
        y = f(torch.ones(n, device=device))
        assert set(y.unique().tolist()) == {0.0, 2.0}


def test_a_generator_keeps_eagers_numbers():
    generator = torch.Generator().manual_seed(3)
    wanted = torch.rand(5, generator=generator)
    generator.manual_seed(3)
    f = torch.compile(lambda x: x + 1, backend="webgpu")
    torch.testing.assert_close(f(torch.rand(5, generator=generator)), wanted + 1)
