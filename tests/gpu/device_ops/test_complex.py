"""Complex tensors on the device: no call on the host, lazy conjugates, layouts, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tests.device_checks import DEVICE, compare
from tests.providers import has_float64

pytestmark = [
    pytest.mark.rotates(6),
    pytest.mark.filterwarnings("ignore:(ComplexHalf support|Casting complex values)"),
]


def numbers(device, *sizes, dtype=torch.complex64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, dtype=torch.complex64, generator=generator).to(device).to(dtype)


def test_arithmetic_and_functions():
    def f(device):
        x, y = numbers(device, 3, 5), numbers(device, 3, 5, seed=1)
        return (
            x + y, x - 2j, x * y, x / y, 1 / x, x**2, x**y, x.abs(), x.angle(), x.sgn(),
            x.exp(), x.log(), x.sqrt(), x.sin(), x.tanh(), x.acos(), x.asinh(), x.sigmoid(),
            x == x, x != y, x.isnan(), torch.isclose(x, y), x.real * 2j, x.to(torch.int32),
        )  # fmt: skip

    compare(f)


def test_lazy_conjugates_and_negatives():
    def f(device):
        x = numbers(device, 3, 4)
        y = x.clone()
        y.conj().mul_(2j)
        z = x.clone()
        z.conj().copy_(y.t().contiguous().t())
        z.imag.neg_()
        w = x.clone()
        w[1:].conj().copy_(torch.ones(2, 4, device=device))
        v = x.clone()
        v.conj().imag.copy_(torch.arange(4.0, device=device))
        return (
            x.conj().resolve_conj(), x.conj().imag.resolve_neg(), x.conj() @ x.t(), x.mH @ x,
            x.conj().imag + 1, x.conj().exp(), torch.view_as_real(x.conj().resolve_conj()),
            x.conj().to(torch.complex32).to(torch.complex64), x.t().conj().contiguous(), y, z, w, v,
            x.conj().sum(), torch.dot(x[0].conj(), x[1]), torch.vdot(x[0], x[1]),
        )  # fmt: skip

    compare(f)


def test_layouts():
    def f(device):
        x = numbers(device, 4, 6)
        part = x[1:, ::2]
        out = torch.empty(6, 4, dtype=torch.complex64, device=device).t()
        torch.exp(x, out=out)
        grown = torch.empty(0, dtype=torch.complex64, device=device)
        torch.add(x, 1j, out=grown)
        y = x.clone()
        y[:, 1].mul_(2j)
        y[2:, ::3] = 1 - 1j
        y.real[0] = 5
        flat = torch.empty(7, device=device).uniform_()[1:]  # starts between two complex numbers
        return (
            part.exp(), part.t() * 2, part.sum(0), x.expand(2, 4, 6) * 1j, x.view(2, 12)[1].abs(),
            out, grown, y, torch.cat([part, part]), x.reshape(-1)[5].exp(), x.unfold(1, 2, 2).abs(),
            torch.view_as_complex(x.real.reshape(12, 2)) * 2j, torch.view_as_real(part) * 2,
            torch.as_strided(x, (3, 2), (7, 1), 2) + 1, flat.to(torch.complex64).imag,
        )  # fmt: skip

    compare(f)


def test_scalars_and_nothing():
    def f(device):
        x = torch.tensor(3 - 4j, device=device)
        nothing = torch.zeros(0, 3, dtype=torch.complex64, device=device)
        return (
            x.exp(), x * 2, x.abs(), x.conj() + x, nothing.exp(), nothing.sum(), nothing.sum(1),
            nothing.prod(), nothing @ numbers(device, 3, 2), torch.cat([nothing, nothing]),
            torch.full((2,), 1j, device=device), torch.zeros(2, dtype=torch.complex64).to(device),
        )  # fmt: skip

    compare(f)


def test_special_values():
    parts = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.5]

    def f(device):
        re, im = torch.meshgrid(torch.tensor(parts), torch.tensor(parts), indexing="ij")
        z = torch.complex(re, im).flatten().to(device)
        number = z[~(z.real.cpu().isnan() | z.imag.cpu().isnan()).to(device)]
        return (
            z.abs(), z.isnan(), z.isinf(), z.isfinite(), z == z, z + 1, z * 2, z.sgn().isnan(),
            # In parts: an angle beside an infinity is compared without tolerance otherwise.
            number.angle(), torch.view_as_real(number.log()), number.sqrt(), number.tanh(),
            torch.view_as_real(number.asinh()),
        )  # fmt: skip

    compare(f)


def test_products_and_transforms():
    def f(device):
        a, b = numbers(device, 2, 3, 4), numbers(device, 2, 4, 5, seed=1)
        image, kernel = numbers(device, 1, 2, 8, 8), numbers(device, 3, 2, 3, 3, seed=2)
        return (
            a @ b, torch.baddbmm(numbers(device, 5), a, b, beta=2j, alpha=1j), a.prod(1),
            a.cumprod(2), torch.linalg.vector_norm(a, dim=1), a.var(2), torch.logsumexp(a, 1),
            torch.nn.functional.conv2d(image, kernel), torch.fft.fft(a), torch.fft.ifft2(a),
            torch.fft.rfft(a.real, norm="ortho"), torch.fft.irfft(a, n=7), torch.fft.hfft(a),
            torch.einsum("bij,bjk->ik", a, b),
        )  # fmt: skip

    compare(f, rtol=1e-4, atol=1e-5)


def test_other_precisions():
    def f(device):
        half, double = (numbers(device, 9, dtype=t) for t in (torch.complex32, torch.complex128))
        return (
            half * 2, half.abs(), half.real, half.to(torch.complex64), half.conj().resolve_conj(),
            double.clone(), double[::2].clone(), double.real, torch.view_as_real(double),
        )  # fmt: skip

    compare(f, host=() if has_float64() else {"aten._to_copy.default"})


def test_random_numbers():
    x = torch.randn(4000, dtype=torch.complex64, device=DEVICE)
    y = torch.rand(4000, dtype=torch.complex64, device=DEVICE)
    torch.testing.assert_close(x.real.var().item(), 0.5, rtol=0.1, atol=0)
    torch.testing.assert_close(x.imag.var().item(), 0.5, rtol=0.1, atol=0)
    assert abs((x.real * x.imag).mean().item()) < 0.05
    assert 0 <= y.imag.min().item() < 0.01
    assert 0.99 < y.real.max().item() < 1


def test_gradients():
    def f(device):
        x = numbers(device, 3, 4).requires_grad_()
        w = numbers(device, 4, 4, seed=1).requires_grad_()
        r = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).to(device)
        r.requires_grad_()
        y = torch.tanh((x * r) @ w.mH).abs() + torch.fft.fft(x).real + torch.polar(r.exp(), r).imag
        y.sum().backward()
        return y.detach(), x.grad, w.grad, r.grad

    compare(f, rtol=1e-4, atol=1e-5)
