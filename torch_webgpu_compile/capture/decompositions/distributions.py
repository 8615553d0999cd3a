"""Gamma, Dirichlet, Poisson and binomial numbers, and the gradients of the first two.

Kernels draw the numbers, by rejection (``webgpu::draw``): in float32, also for tensors of float64.
What is no parameter of a distribution gives NaN; to raise an error the host would have to wait for
the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import sampling as _sampling  # noqa: F401  defines ``webgpu::draw``
from .random import exponential_numbers, seed

aten = torch.ops.aten

_FLOATS = (torch.float32, torch.float64)
_MOST = 2.0**100  # a parameter: float32 has the squares


def _draw(distribution: str, *parameters: Tensor) -> Tensor:
    given = [parameter.float() for parameter in parameters]
    found: Tensor = torch.ops.webgpu.draw.default(seed(), distribution, given)
    return found


def _gamma(shape: Tensor) -> tuple[Tensor, Tensor]:
    """(x, y) such that x · exp(y) are gamma distributed, of a shape that is a number above 0.

    y is that of uniform numbers to the power of 1 / shape, which a float may not hold, for a small
    shape: the others are of shape + 1 then.
    """
    small = shape < 1
    drawn = _draw("gamma", torch.where(small, shape + 1, shape).clamp(1, _MOST)).to(shape.dtype)
    power = -exponential_numbers(shape.shape, shape.device, shape.dtype) / shape
    return drawn, torch.where(small, power, 0.0)


def standard_gamma(self: Tensor, generator: Any = None) -> Any:
    """Gamma distributed numbers of the shapes in ``self`` and rate 1, above 0."""
    if generator is not None or self.dtype not in _FLOATS:
        return NotImplemented
    drawn, power = _gamma(self)
    least = torch.finfo(self.dtype).tiny
    return torch.where(self >= 0, (drawn * power.exp()).clamp_min(least), math.nan)


def sample_dirichlet(self: Tensor, generator: Any = None) -> Any:
    """Dirichlet distributed rows of the concentrations in ``self``, in (0, 1)."""
    if generator is not None or self.dtype not in _FLOATS or self.dim() == 0:
        return NotImplemented
    drawn, power = _gamma(self)
    info = torch.finfo(self.dtype)
    share = torch.softmax(drawn.log() + power, -1).clamp(info.tiny, 1 - info.eps / 2)
    return torch.where((self >= 0).all(-1, keepdim=True), share, math.nan)


def poisson(self: Tensor, generator: Any = None) -> Any:
    """Poisson distributed numbers of the rates in ``self``, in its dtype."""
    if generator is not None or not self.is_floating_point():
        return NotImplemented
    inside = (self >= 0) & (self <= _MOST)
    drawn = _draw("poisson", torch.where(inside, self, 0))
    beyond = torch.where(self > 0, self, math.nan).to(drawn.dtype)
    return torch.where(inside, drawn, beyond).to(self.dtype)


def binomial(count: Tensor, prob: Tensor, generator: Any = None) -> Any:
    """How many of ``count`` trials succeed with the probability ``prob``; they broadcast.

    Without trials, or a probability above 0, it is none; from a probability of 1 on, all.
    """
    if generator is not None or count.dtype not in _FLOATS or prob.dtype != count.dtype:
        return NotImplemented
    sizes = torch.broadcast_shapes(count.shape, prob.shape)  # type: ignore[no-untyped-call]
    count, prob = count.expand(sizes), prob.expand(sizes)
    often = prob > 0.5
    rare = torch.where(often, 1 - prob, prob)
    inside = (count > 0) & (count <= _MOST) & (rare > 0)
    drawn = _draw("binomial", torch.where(inside, count, 0), torch.where(inside, rare, 0))
    found = torch.where(inside, drawn.to(count.dtype), 0)
    found = torch.where(often, count - found, found)
    found = torch.where(count <= 0, 0, found)
    return torch.where((count <= _MOST) & ~prob.isnan(), found, math.nan)


def _like(*given: Tensor, generator: Any = None) -> Tensor:
    tensors = [value for value in given if isinstance(value, Tensor)]  # a generator may be there
    sizes = torch.broadcast_shapes(*(x.shape for x in tensors))  # type: ignore[no-untyped-call]
    return tensors[0].new_empty(sizes)


META: dict[Any, Any] = dict.fromkeys(
    (
        *(aten.binomial.default, aten._standard_gamma_grad.default),
        *(aten._sample_dirichlet.default, aten._dirichlet_grad.default),
    ),
    _like,
)
"""What results are like, where PyTorch does not say."""


# -- gradients: how a sample moves with its parameter while its quantile stays ------------------

# The tables are those of ATen ``Distributions.h``; the last index is the power of log(alpha), or of
# log(total) - log(alpha) + log(x).
_GAMMA_TABLE = (
    (
        (0.16009398, -0.094634809, 0.025146376, -0.0030648343),
        (0.53487893, 0.1298071, 0.065735949, -0.0015649758),
        (0.040121004, -0.0065914022, -0.0026286047, -0.0013441777),
    ),
    (
        (1.0, 0.32668115, 0.10406089, 0.0014179084),
        (0.16639465, 0.020070113, -0.0035938915, -0.00058392623),
        (0.017050642, -0.0021309326, 0.00085092367, -1.5247877e-07),
    ),
)
_BETA_TABLE = (
    (
        (
            (1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
            (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
            (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013),
        ),
        (
            (0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
            (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
            (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05),
        ),
        (
            (-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
            (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
            (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05),
        ),
    ),
    (
        (
            (1.0, -0.02924021934, -0.04438342661, 0.007285809825),
            (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
            (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149),
        ),
        (
            (0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
            (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
            (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05),
        ),
        (
            (0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
            (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
            (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06),
        ),
    ),
)


def _polynomial(factors: Any, x: Tensor) -> Any:
    """Σ factor k · xᵏ."""
    total = factors[-1]
    for factor in factors[-2::-1]:
        total = total * x + factor
    return total


def _log1p_rest(x: Tensor) -> Tensor:
    """log(1 + x) - x to its own accuracy."""
    s = x / (2 + x)
    terms = 18 if x.dtype == torch.float64 else 8
    series = _polynomial([2 / (2 * k + 3) for k in range(terms)], s * s)
    return torch.where((x > -0.5) & (x < 1), s * (s * s * series - x), torch.log1p(x) - x)


def _stirling(x: Tensor) -> Tensor:
    """Γ(x + 1) over its leading term, in short."""
    return 1 + 1 / (12 * x) + 1 / (288 * x * x)


def _number(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0, x)


def standard_gamma_grad(self: Tensor, output: Tensor) -> Any:
    """The derivative of ``output``, gamma distributed, by its shape ``self``."""
    if self.dtype not in _FLOATS or output.dtype != self.dtype:
        return NotImplemented
    alpha, x = torch.broadcast_tensors(self, output)  # type: ignore[no-untyped-call]
    # Around the mean Rice's expansion of a saddle point is 0 / 0.
    offset = (x - alpha) / alpha
    w = x / alpha
    series = 1440 + w * (3600 - 720 * w) + (107 + w * (318 - 65 * w)) / alpha
    at_mean = (288 + 24 / alpha + 1 / (alpha * alpha)) * series / 1244160
    ratio = torch.log1p(offset)
    root = (8 * alpha).sqrt()
    power = (-alpha * _log1p_rest(offset)) ** -1.5
    both = -root / (offset * alpha) + torch.where(offset < 0, -power, power)
    slope = ratio * both - (2 / alpha).sqrt() * (2 + offset) / (alpha * offset * offset)
    around = -(1 + 1 / (12 * alpha) * (1 + 1 / (24 * alpha))) * x * slope / root
    large = torch.where(offset.abs() <= 0.1, at_mean, around)
    u, v = w.log(), alpha.log()
    tables = ([_polynomial(row, v) for row in table] for table in _GAMMA_TABLE)
    above, below = (_polynomial(row, u) for row in tables)
    found = torch.where(alpha > 8, large, (above / below).exp())
    return torch.where(x < 0.8, _small_gamma(alpha, x), found)


def _small_gamma(alpha: Tensor, x: Tensor) -> Tensor:
    """By Taylor's series around 0, with ψ(α) as ψ(α + 1) - 1 / α: the latter is in all terms."""
    first, second = 1 / alpha, torch.zeros_like(x)
    numerator = torch.ones_like(x)
    for k in range(1, 6):
        numerator = numerator * -x / k
        part = numerator / (alpha + k)
        first = first + part
        second = second + part * k / (alpha * (alpha + k))
    change = (x.log() - torch.digamma(alpha + 1)) * first + second
    return _number(-change * x * x.exp())


def dirichlet_grad(x: Tensor, alpha: Tensor, total: Tensor) -> Any:
    """The derivative of a Beta distributed x by ``alpha`` over 1 - x, of alpha + beta = ``total``.

    Source: ATen ``Distributions.h``, with differences written so that float32 has them.
    """
    if x.dtype not in _FLOATS or not x.dtype == alpha.dtype == total.dtype:
        return NotImplemented
    x, alpha, total = torch.broadcast_tensors(x, alpha, total)  # type: ignore[no-untyped-call]
    beta = total - alpha
    boundary = total * x * (1 - x)
    u = x.log()
    a = alpha.log() - u
    b = total.log() - a
    above, below = (
        _polynomial([_polynomial([_polynomial(f, b) for f in row], a) for row in table], u)
        for table in _BETA_TABLE
    )
    psi_next, psi_total = torch.digamma(alpha + 1), torch.digamma(total)
    factor = psi_total - psi_next + 1 / alpha  # ψ(total) - ψ(alpha)
    rational = above / below * x * factor / beta
    found = torch.where((alpha > 6) & (beta > 6), _middle_beta(x, alpha, beta), rational)
    near_one = (x >= 0.5) & (boundary < 0.75)
    found = torch.where(near_one, -_small_beta_by_beta(1 - x, beta, alpha, factor), found)
    near_zero = _small_beta(x, alpha, beta, psi_next - psi_total - u)
    return torch.where((x <= 0.5) & (boundary < 2.5), near_zero, found)


def _small_beta(x: Tensor, alpha: Tensor, beta: Tensor, factor: Tensor) -> Tensor:
    """For x near 0, with ψ(alpha + 1) - ψ(alpha + beta) - log(x); see `_small_gamma`."""
    numerator = torch.ones_like(x)
    series = factor / alpha
    for k in range(1, 11):
        numerator = numerator * (k - beta) * x / k
        series = series + numerator / (alpha + k) * (factor - k / (alpha * (alpha + k)))
    return _number(x * (1 - x) ** -beta * series)


def _small_beta_by_beta(x: Tensor, alpha: Tensor, beta: Tensor, factor: Tensor) -> Tensor:
    """The derivative by beta for x near 0, with ψ(alpha + beta) - ψ(beta)."""
    numerator, betas, slope = torch.ones_like(x), torch.ones_like(x), torch.zeros_like(x)
    series = factor / alpha
    for k in range(1, 9):
        numerator = numerator * -x / k
        slope = slope * (beta - k) + betas
        betas = betas * (beta - k)
        series = series + numerator / (alpha + k) * (slope + factor * betas)
    return _number(-((1 - x) ** (1 - beta)) * series)


def _middle_beta(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """For large alpha and beta, by Rice's expansion of a saddle point."""
    total = alpha + beta
    r, s = alpha / total, beta / total  # float32 does not hold the powers of alpha and beta
    inverse = 1 / total
    at_mean = (
        47 * x * s**4 * inverse
        + r * s**3 * ((43 + 320 * x) * inverse + 540 * s * x)
        + 3 * (r * s) ** 2 * ((59 - 90 * x) * inverse + 180 * s)
        + r**3 * s * ((453 - 455 * x) * inverse + 1620 * s * (1 - x))
        + 8 * r**4 * (1 - x) * (135 * s - 11 * inverse)
    )
    at_mean = at_mean * (12 + 1 / alpha) * (12 + 1 / beta)
    at_mean = at_mean / ((1 - x) * 12960 * r * r * s * (12 + inverse) * total)
    offset = total * x - alpha
    share = offset / total
    stirling = _stirling(alpha) * _stirling(beta) / _stirling(total)
    first = (x - 1) * r * (2 * r + s) - x * s * s
    first = first / ((2 * r / s).sqrt() * total * total.sqrt() * share * share)
    power = (-alpha * _log1p_rest(offset / alpha) - beta * _log1p_rest(-offset / beta)) ** -1.5
    last = (8 * r * beta).sqrt() / offset + torch.where(offset < 0, power, -power)
    around = first - 0.5 * torch.log1p(offset / alpha) * last
    around = -stirling * x / (2 * r * beta).sqrt() * around
    deviation = (r * s / (total + 1)).sqrt()
    return torch.where(share.abs() <= 0.1 * deviation, at_mean, around)


DECOMPOSITIONS: dict[Any, Any] = {
    aten._standard_gamma.default: standard_gamma,
    aten._standard_gamma_grad.default: standard_gamma_grad,
    aten._sample_dirichlet.default: sample_dirichlet,
    aten._dirichlet_grad.default: dirichlet_grad,
    aten.poisson.default: poisson,
    aten.binomial.default: binomial,
}
