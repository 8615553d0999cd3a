"""Random numbers: their statistics, their lowering, their decompositions."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness import check
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.capture.decompositions import distributions, random
from torch_webgpu_compile.lowering import random as _  # noqa: F401
from torch_webgpu_compile.tensors import generators
from torch_webgpu_compile.torch_ops import custom_ops


def seed(k=0):
    torch.manual_seed(k)
    return custom_ops.seed(0)


def test_random_operators_have_seeds_of_their_own():
    def are_different(seeds):
        return len(set(map(tuple, seeds.tolist()))) == len(seeds)

    drawn = bytearray().join(generators.draw_seeds(0, 3) for call in range(3))
    assert are_different(torch.frombuffer(drawn, dtype=torch.int32).view(9, 2))
    assert are_different(HostGraph._draw_seeds(None, 3))


def test_uniform_statistics():
    x = custom_ops.uniform(seed(), [1 << 20]).double()
    assert x.min() >= 0
    assert x.max() < 1
    n = x.numel()
    assert abs(x.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(x.var() - 1 / 12) < 1e-3
    # χ² over 256 bins: mean 255, standard deviation √510.
    counts = torch.histc(x, 256, 0, 1)
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 5 * math.sqrt(510)
    for lag in (1, 2, 64, 1024):
        correlation = torch.corrcoef(torch.stack([x[:-lag], x[lag:]]))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n)


def test_seeds_give_independent_numbers():
    x, y = (custom_ops.uniform(seed(k), [1 << 18]) for k in (0, 1))
    assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 5 / math.sqrt(x.numel())
    assert torch.equal(x, custom_ops.uniform(seed(0), [1 << 18]))


@pytest.mark.parametrize("size", [(), (7,), (3, 5), (2, 3, 4), (0, 3)])
def test_lowering_gives_the_same_numbers(size):
    check(lambda s: torch.ops.webgpu.uniform(s, list(size)), seed(), atol=0, rtol=0)


def test_operators_are_consistent_with_their_fakes():
    torch.library.opcheck(custom_ops.uniform, (seed(), [3, 4]))


N = 200_000


@pytest.mark.parametrize(
    ("sample", "mean", "std"),
    [
        (lambda: random.rand([N]), 0.5, math.sqrt(1 / 12)),
        (lambda: random.randn([N]), 0, 1),
        (lambda: random.uniform(torch.empty(N), -1, 3), 1, 4 * math.sqrt(1 / 12)),
        (lambda: random.normal_functional(torch.empty(N), 2, 3), 2, 3),
        (lambda: random.normal(torch.full((N,), 2.0), 3.0), 2, 3),
        (lambda: random.bernoulli(torch.full((N,), 0.3)), 0.3, math.sqrt(0.21)),
        (lambda: random.bernoulli_p(torch.empty(N), 0.3), 0.3, math.sqrt(0.21)),
        (lambda: random.exponential(torch.empty(N), 2), 0.5, 0.5),
        (lambda: random.randint(10, [N]).double(), 4.5, math.sqrt(99 / 12)),
        (lambda: random.randint_low(-5, 5, [N]).double(), -0.5, math.sqrt(99 / 12)),
        (lambda: random.native_dropout(torch.ones(N), 0.25, True)[0], 1, math.sqrt(1 / 3)),
        (lambda: random.fused_dropout(torch.ones(N), 0.75)[0], 1, math.sqrt(1 / 3)),
        (lambda: random.randint(1 << 40, [N]) / 2.0**40, 0.5, math.sqrt(1 / 12)),
        (lambda: random.random_from(torch.empty(N)) / 2.0**24, 0.5, math.sqrt(1 / 12)),
        (lambda: random.random_from(torch.empty(N, dtype=torch.int64)) / 2.0**63, 0.5, 12**-0.5),
        (lambda: random.random_from(torch.empty(N, dtype=torch.uint8)), 127.5, 256 * 12**-0.5),
        (lambda: random.random_to(torch.empty(N), 10), 4.5, math.sqrt(99 / 12)),
        (lambda: random.geometric(torch.empty(N), 0.25), 4, math.sqrt(0.75) / 0.25),
        (lambda: random.log_normal(torch.empty(N), 0, 1).log(), 0, 1),
        (lambda: random.cauchy(torch.empty(N), 2, 3).sub(2).div(3).atan(), 0, math.pi / 12**0.5),
        (lambda: distributions.standard_gamma(torch.full((N,), 0.3)), 0.3, 0.3**0.5),
        (lambda: distributions.poisson(torch.full((N,), 7.0)), 7, 7**0.5),
        (lambda: distributions.binomial(torch.full((N,), 9.0), torch.tensor(0.7)), 6.3, 1.89**0.5),
        (lambda: random.bernoulli_p(torch.empty(N), torch.tensor(0.3)), 0.3, 0.21**0.5),
        (
            lambda: random.rrelu_with_noise(-torch.ones(N), torch.ones(N), 0, 1, True)[0],
            -0.5,
            12**-0.5,
        ),
    ],
)
def test_distributions(sample, mean, std):
    torch.manual_seed(0)
    x = sample().double()
    assert abs(x.mean() - mean) < 5 * std / math.sqrt(N)
    assert abs(x.std() / std - 1) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_never_rounds_up_to_one(dtype):
    torch.manual_seed(0)
    x = random.rand([N], dtype=dtype)
    assert x.dtype == dtype
    assert x.max() < 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("replacement", [False, True])
def test_multinomial(dtype, samples, replacement):
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 4.0, 0.0, 5.0], dtype=dtype).expand(N, 4)
    chosen = random.multinomial(weights, samples, replacement)
    assert chosen.shape == (N, samples)
    first = torch.bincount(chosen[:, 0], minlength=4) / N
    torch.testing.assert_close(first, torch.tensor([0.1, 0.4, 0.0, 0.5]), rtol=0, atol=0.005)
    if replacement:
        assert (chosen != 2).all()
    else:
        assert all(len(set(row)) == samples for row in chosen[:1000].tolist())


def test_float64_has_more_bits():
    torch.manual_seed(0)
    for x in (random.rand([N], dtype=torch.float64), random.randn([N], dtype=torch.float64)):
        assert x.dtype is torch.float64
        assert len(x.unique()) == N
        assert (x.float().double() != x).any()


def test_what_is_left_to_the_host():
    generator = torch.Generator()
    assert random.uniform(torch.empty(3), 0, 1, generator=generator) is NotImplemented
    assert random.rand([3], dtype=torch.int32) is NotImplemented
    assert random.randint_low(-(1 << 63), 1, [3]) is NotImplemented
    assert random.random_from(torch.empty(3), generator=generator) is NotImplemented
    assert random.multinomial(torch.ones(2, 3, 4), 1) is NotImplemented
    assert random.multinomial(torch.ones(3), 0) is NotImplemented


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(-3, 0), (0, 1), (1, 3), (3, 5)])
def test_gradients_of_gamma_and_beta_numbers(low, high, dtype):
    """As PyTorch has them in float64: float32 is off by what the expansions lose there."""
    torch.manual_seed(0)
    alpha, beta = (10 ** torch.empty(2, 2000).uniform_(low, high)).to(dtype)
    x = torch._standard_gamma(alpha).clamp_min(1e-37)
    share = torch._sample_dirichlet(torch.stack([alpha, beta], -1))[:, 0]
    loose = {"rtol": 1e-3, "atol": 0} if dtype == torch.float32 else {"rtol": 1e-6, "atol": 0}
    for rule, op, arguments in (
        (distributions.standard_gamma_grad, torch._standard_gamma_grad, (alpha, x)),
        (distributions.dirichlet_grad, torch._dirichlet_grad, (share, alpha, alpha + beta)),
    ):
        wanted = op(*(argument.double() for argument in arguments))
        torch.testing.assert_close(rule(*arguments).double(), wanted, **loose)


def test_permutations_are_uniform():
    torch.manual_seed(0)
    drawn = torch.stack([random.randperm(3, dtype=torch.int32) for call in range(1200)])
    assert drawn.dtype == torch.int32
    counts = drawn.mul(torch.tensor([9, 3, 1])).sum(1).unique(return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - 200.0) ** 2 / 200).sum() < 25  # χ² of 5 degrees of freedom
    assert torch.equal(random.randperm(5000).sort().values, torch.arange(5000))
