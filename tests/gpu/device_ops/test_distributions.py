"""Random numbers of distributions whose kernels reject some: their statistics and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tests.compiling import native
from torch_webgpu_compile import counters

N = 50_000
# 30 cases are tried with one seed each.
LEAST = 1e-4


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    counters.reset()
    yield
    assert not counters.fallbacks


def full(*values):
    return [torch.full((N,), float(value), device="webgpu") for value in values]


def probability_of_counts(numbers, law):
    """Of a χ² statistic as large as that of these numbers, in at most sixty bins."""
    low, high = law.ppf(1e-4), law.ppf(1 - 1e-4)
    edges = np.unique(np.floor(np.linspace(low, high, 60))) + 0.5
    edges = np.array([-np.inf, *edges, np.inf])
    counted = np.histogram(numbers.cpu().double().numpy(), edges)[0]
    wanted = np.diff(law.cdf(edges)) * N
    rare = wanted < 5
    counted = np.append(counted[~rare], counted[rare].sum())
    wanted = np.append(wanted[~rare], max(wanted[rare].sum(), 1e-3))
    return stats.chisquare(counted, wanted * N / wanted.sum()).pvalue


@pytest.mark.rotates(2)
@pytest.mark.parametrize("rate", [0.01, 3, 9.99, 10, 45, 1e4, 1e6])
def test_poisson(rate):
    assert probability_of_counts(torch.poisson(*full(rate)), stats.poisson(rate)) > LEAST


@pytest.mark.rotates(2)
@pytest.mark.parametrize(
    ("count", "p"), [(1, 0.5), (10, 0.97), (30, 0.4), (1000, 0.001), (1000, 0.9), (1e6, 0.3)]
)
def test_binomial(count, p):
    law = stats.binom(count, float(np.float32(p)))
    assert probability_of_counts(torch.binomial(*full(count, p)), law) > LEAST


@pytest.mark.rotates(2)
@pytest.mark.parametrize("shape", [0.2, 1, 2.5, 30, 1e6])
def test_gamma(shape):
    drawn = torch._standard_gamma(*full(shape)).cpu().numpy()
    assert stats.kstest(drawn, stats.gamma(shape).cdf).pvalue > LEAST


@pytest.mark.parametrize("shapes", [(1, 2), (0.6, 0.7, 4), (0.002, 0.001)])
def test_dirichlet(shapes):
    drawn = torch._sample_dirichlet(torch.stack(full(*shapes), -1)).cpu()
    torch.testing.assert_close(drawn.sum(-1), torch.ones(N))
    for k, shape in enumerate(shapes):
        rest = sum(shapes) - shape
        law = stats.beta(shape, rest)
        if min(shapes) > 0.1:
            assert stats.kstest(drawn[:, k].numpy(), law.cdf).pvalue > LEAST
        assert abs(drawn[:, k].mean() - law.mean()) < 5 * law.std() / math.sqrt(N)


def test_ends_of_parameters():
    inf, nan = math.inf, math.nan
    rates = torch.tensor([0, -1, nan, inf, 1e20], device="webgpu")
    assert torch.poisson(rates).cpu()[[0, 3]].tolist() == [0, inf]
    assert torch.poisson(rates).cpu()[[1, 2]].isnan().all()
    shapes = torch.tensor([0, -1, nan], device="webgpu")
    tiny = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(
        torch._standard_gamma(shapes).cpu(), torch.tensor([tiny, nan, nan]), equal_nan=True
    )
    counts = torch.tensor([-1, 3, 3, 0, 5, nan, 5.0], device="webgpu")
    chances = torch.tensor([0.5, -1, 2, 0.5, 0, 0.5, nan], device="webgpu")
    torch.testing.assert_close(
        torch.binomial(counts, chances).cpu(),
        torch.tensor([0, 0, 3, 0, 0, nan, nan]),
        equal_nan=True,
    )
    assert torch.binomial(torch.ones(3, device="webgpu"), chances[:2, None]).shape == (2, 3)
    assert torch.poisson(rates[:0]).shape == (0,)
    assert torch._sample_dirichlet(rates.reshape(5, 1)[:, :0]).shape == (5, 0)
    assert torch.poisson(torch.full((9,), 3, dtype=torch.float16, device="webgpu")).sum() > 0


@pytest.mark.rotates(2)
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_compiled(device):
    def f(shape):
        return torch._standard_gamma(shape), torch.poisson(shape), torch.binomial(shape, shape / 99)

    def shares(rows):
        return torch.distributions.Dirichlet(rows, validate_args=False).rsample()

    rows = torch.full((9, 3), 2.0, device=device, requires_grad=True)
    native(shares)(rows)[:, 0].sum().backward()
    gradient = rows.grad.cpu()
    assert (gradient[:, 0] > 0).all()
    assert (gradient[:, 1:] < 0).all()
    f = native(f)
    shape = torch.full((1000,), 20.0, device=device)
    torch.manual_seed(1)
    first, second = f(shape), f(shape)
    torch.manual_seed(1)
    for a, b, again, mean in zip(first, second, f(shape), (20, 20, 20 * 20 / 99), strict=True):
        assert torch.equal(a, again)
        assert not torch.equal(a, b)
        assert abs(a.mean() - mean) < 5 * math.sqrt(mean / 1000)


@pytest.mark.rotates(2)
def test_distributions_of_torch():
    """All that are made of these, and gradients by what is drawn."""
    D = torch.distributions
    a = torch.tensor([0.5, 2.0, 9.0], device="webgpu", requires_grad=True)
    b = torch.tensor([1.5, 2.0, 30.0], device="webgpu")
    for law in (D.Beta(a, b), D.Gamma(a, b), D.StudentT(a), D.Dirichlet(a)):
        drawn = law.rsample((4,))
        (gradient,) = torch.autograd.grad(drawn.sum(), a)
        assert gradient.isfinite().all()
        assert law.log_prob(drawn).isfinite().all()
    half = torch.full((3,), 0.5, device="webgpu")
    for law in (
        *(D.Poisson(b), D.Binomial(10, half), D.NegativeBinomial(5.0, half)),
        D.Multinomial(10, half),
    ):
        assert (law.sample((4,)).mean() - law.mean.mean()).abs() < 6
