"""Numbers are not code: an operator that is called with another number compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.providers import require_float64
from torch_webgpu_compile import counters

_INF, _NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([-_INF, -2.5, -2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, _INF, _NAN])
GRID = torch.linspace(-2, 2, 128).view(8, 16)
POSITIVE = GRID.abs() + 0.1
WIDE = torch.tensor([-1e300, -2.0, -0.0, 0.1, 1 + 1e-12, 1e-300, _INF, _NAN], dtype=torch.float64)
IMAGE = torch.linspace(-1, 1, 2 * 3 * 6 * 5).view(2, 3, 6, 5)
LABELS = torch.tensor([0, 5, 2, 3, 5, 7, 1, 4])
SCALES = (1.21, 1.25, 1.3, 1.32)  # with the same sizes of IMAGE

Number = Any


def _batch_norm(x: torch.Tensor, momentum: Number) -> Any:
    mean, variance = x.new_zeros(16), x.new_ones(16)
    return F.batch_norm(x, mean, variance, training=True, momentum=momentum), mean, variance


def _gradient(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(x: torch.Tensor, number: Number) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x, number).sum(), x)[0]

    return call


def smooth_l1(x: torch.Tensor, number: Number) -> torch.Tensor:
    return F.smooth_l1_loss(x, x.flip(0), beta=number)


def attention(x: torch.Tensor, number: Number) -> torch.Tensor:
    query, key, value = x.view(1, 2, 4, 16), x.flip(0).view(1, 2, 4, 16), x.sin().view(1, 2, 4, 16)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=number)


def _step(kind: Any, x: torch.Tensor, lr: float, *others: torch.dtype) -> Any:
    parameters = [nn.Parameter(x.to(dtype, copy=True)) for dtype in (x.dtype, *others)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    kind(parameters, lr, foreach=True).step()
    return [parameter.detach() for parameter in parameters]


# By operator: what is called with (tensor, number), the tensor, and numbers. All but the first two
# compile nothing.
CALLS: dict[str, tuple[Callable[..., Any], torch.Tensor, tuple[Number, ...]]] = {
    "pow": (lambda x, n: x**n, SPECIAL, (1.1, 2.5, 4.0, -1.5, 5.0, -3.0)),
    "pow of halves": (lambda x, n: x**n, SPECIAL.half(), (1.1, 2.5, 4.0, -1.5)),
    "pow of integers": (lambda x, n: x**n, LABELS - 3, (4, 5, 6, 7)),
    "pow of a number": (lambda x, n: n**x, SPECIAL, (1.1, 0.25, 3.0, 0.0, -2.0)),
    "clamp": (lambda x, n: x.clamp(-n, n), SPECIAL, (0.5, 1.5, 2.5)),
    "negative": (lambda x, n: x * n, GRID, (-2, -3, -4, -5)),
    "roll": (lambda x, n: x.roll(n, 1), GRID, (2, 3, 5, 17, 40)),
    "roll back": (lambda x, n: x.roll((n, n - 1), (0, 1)), GRID, (-1, -3, -5, -17)),
    "pad": (lambda x, n: F.pad(x, (n, 2 * n)), GRID, (2, 3, 4, 9)),
    "crop": (lambda x, n: F.pad(x, (n, n)), GRID, (-1, -3, -5)),
    "reflect": (lambda x, n: F.pad(x, (n, n), mode="reflect"), GRID, (2, 3, 4)),
    "circular": (lambda x, n: F.pad(x, (n, n), mode="circular"), GRID, (5, 7, 5, 7)),
    "tril": (lambda x, n: x.tril(n), GRID, (2, 3, 5, 20)),
    "triu": (lambda x, n: x.triu(n), GRID, (-2, -3, -5, -20)),
    "linspace": (lambda x, n: torch.linspace(n, 2 * n, 7, device=x.device), GRID, (0.5, 1.5, 9.0)),
    "steps": (lambda x, n: torch.linspace(0, 1, n, device=x.device), GRID, (5, 6, 9, 33)),
    "smooth_l1": (smooth_l1, GRID, (0.5, 1.5, 0.1)),
    "smooth_l1 gradient": (_gradient(smooth_l1), GRID, (0.5, 1.5, 0.1)),
    "huber": (lambda x, n: F.huber_loss(x, x.flip(0), delta=n), GRID, (0.5, 1.5, 0.1)),
    "label smoothing": (
        lambda x, n: F.cross_entropy(x, LABELS.to(x.device), label_smoothing=n),
        *(GRID, (0.1, 0.2, 0.3)),
    ),
    "ignore_index": (
        lambda x, n: F.cross_entropy(x, LABELS.to(x.device), ignore_index=n),
        *(GRID, (2, 5, 7, 3)),
    ),
    "norm": (lambda x, n: x.norm(n), GRID, (1.5, 2.5, 3.0, -1.5)),
    "norm of rows": (lambda x, n: torch.linalg.vector_norm(x, n, 1), GRID, (3, 4, 5)),
    "renorm": (lambda x, n: x.renorm(2, 0, n), GRID, (0.5, 1.5, 2.5)),
    "dist": (lambda x, n: torch.dist(x, x.flip(1), n), GRID, (1.5, 2.5, 3.5)),
    "cdist": (lambda x, n: torch.cdist(x, x.flip(1), n), GRID, (1.5, 2.5, 3.5)),
    "attention": (attention, GRID, (0.3, 0.5, 1.5)),
    "attention gradient": (_gradient(attention), GRID, (0.3, 0.5, 1.5)),
    "attention of halves": (attention, GRID.half(), (0.3, 0.5, 1.5)),
    "layer_norm": (lambda x, n: F.layer_norm(x, (16,), eps=n), GRID, (1e-5, 1e-3, 0.1)),
    "layer_norm in training": (
        lambda x, n: F.layer_norm(x.detach().requires_grad_(), (16,), eps=n).detach(),
        *(GRID, (1e-5, 1e-3, 0.1)),
    ),
    "group_norm": (lambda x, n: F.group_norm(x, 4, eps=n), GRID, (1e-5, 1e-3, 0.1)),
    "rms_norm": (lambda x, n: F.rms_norm(x, (16,), eps=n), GRID, (1e-5, 1e-3, 0.1)),
    "batch_norm": (_batch_norm, GRID, (0.1, 0.2, 0.01)),
    "batch_norm eps": (
        lambda x, n: F.batch_norm(x, x[0], x[1].abs(), eps=n),
        *(GRID, (1e-5, 1e-3, 0.1)),
    ),
    "interpolate": (
        lambda x, n: F.interpolate(x, scale_factor=n, mode="bilinear"),
        *(IMAGE, SCALES),
    ),
    "nearest": (lambda x, n: F.interpolate(x, scale_factor=n), IMAGE, SCALES),
    "bilinear gradient": (
        _gradient(lambda x, n: F.interpolate(x, scale_factor=n, mode="bilinear")),
        *(IMAGE, SCALES),
    ),
    "histc": (lambda x, n: x.histc(n, -1, 1), GRID, (4, 5, 9)),
    "bounds of histc": (lambda x, n: x.histc(5, -n, n), GRID, (0.5, 1.5, 1.75)),
    "std": (lambda x, n: x.std(1, correction=n), GRID, (2, 3, 5, 15)),
    "logit": (lambda x, n: torch.logit(x, n), POSITIVE / 3, (0.1, 0.2, 0.05)),
    "quantile": (lambda x, n: x.quantile(n), GRID, (0.1, 0.25, 0.7)),
    "addmm": (
        lambda x, n: torch.addmm(x, x[:, :8], x, beta=n, alpha=n),
        *(GRID, (0.5, 1.5, -0.25)),
    ),
    "leaky_relu": (F.leaky_relu, GRID, (0.1, 0.2, 0.3)),
    "nan_to_num": (lambda x, n: x.nan_to_num(n), SPECIAL, (0.5, 1.5, 2.5)),
    "halves": (
        lambda x, n: (x == n, x > n, x <= n, x.clamp(-n, n), x.masked_fill(x > 0, n), x.eq(n)),
        *(POSITIVE.half(), (0.1, 0.3, 0.7, 1e-9)),
    ),
    "halves of numbers": (
        lambda x, n: (x.where(x > 1, n), torch.full_like(x, n), F.pad(x, (1, 1), value=n)),
        *(POSITIVE.bfloat16(), (0.1, 0.3, 0.7, 1e-9)),
    ),
    "complex": (
        lambda x, n: (x * n, x.add(x, alpha=n), x / n, x.lerp(x * 2, n), torch.full_like(x, n)),
        *(torch.complex(GRID, GRID.flip(0)), (0.1, 0.3, 0.7, 1e-9)),
    ),
    "complex of float64": (
        lambda x, n: (x * n, x.add(x, alpha=n), n - x),
        *(torch.complex(WIDE[3:6], WIDE[1:4]), (0.1, 1e-12, 1 + 1e-12)),
    ),
    "integers": (
        lambda x, n: (x * n, n - x, x / n, x**n, x > n, x.clamp(-n, n), x.where(x > 1, n), x % n),
        *(LABELS - 3, (0.1, 0.3, 1.7, 2.5)),
    ),
    "float64": (
        lambda x, n: (x * n, x.add(x, alpha=n), x.abs() ** n, x == n, x.lerp(x + 1, n), n / x),
        *(WIDE, (0.1, 1e-12, 1 + 1e-12, 0.7)),
    ),
    "float64 rounded": (
        lambda x, n: (x.clamp(-n, n), x.where(x > 0, n), torch.full_like(x, n), x.clone().fill_(n)),
        *(WIDE, (0.1, 1e-12, 1 + 1e-12, 1e300)),
    ),
    "step in float64": (
        lambda x, n: _step(torch.optim.AdamW, x, n),
        *(WIDE[:6], (0.1, 1e-3, 1 + 1e-12, 0.7)),
    ),
    "steps in float32 and float64": (
        lambda x, n: _step(torch.optim.Adam, x, n, torch.float32),
        *(WIDE[1:5], (0.1, 1e-3, 1 + 1e-12, 0.7)),
    ),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", CALLS)
def test_other_numbers_compile_nothing(name: str) -> None:
    call, x, numbers = CALLS[name]
    if x.dtype in (torch.float64, torch.complex128):
        require_float64()
    on_device = x.to("webgpu")
    for k, number in enumerate(numbers):
        before = counters.kernels_compiled
        got = call(on_device, number)
        torch.webgpu.synchronize()
        compiled = counters.kernels_compiled - before
        assert k < 2 or not compiled, f"{number} compiled {compiled}"
        wanted = call(x, number)
        torch.testing.assert_close(got, wanted, check_device=False, equal_nan=True)


def test_random_numbers_of_any_kind() -> None:
    """Moments of what is drawn, and that nothing is compiled but for the first two numbers."""
    x = torch.zeros(4096, device="webgpu")

    def of_dropout(p: float) -> torch.Tensor:
        return F.dropout(torch.ones_like(x), p)

    def of_attention(p: float) -> torch.Tensor:
        query = torch.zeros(1, 1, 64, 64, device="webgpu")
        value = 64 * torch.eye(64, device="webgpu")  # each weight by itself, as 1
        return F.scaled_dot_product_attention(query, query, value.expand(1, 1, -1, -1), dropout_p=p)

    cases: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., tuple[float, float]]]] = {
        "normal_": (lambda n: x.normal_(n, 3 * n), lambda n: (n, 3 * n)),
        "uniform_": (lambda n: x.uniform_(-n, 3 * n), lambda n: (n, 4 * n / math.sqrt(12))),
        "bernoulli_": (lambda n: x.bernoulli_(n / 8), lambda n: (n / 8, (n * (8 - n)) ** 0.5 / 8)),
        "dropout": (lambda n: of_dropout(n / 8), lambda n: (1, (n / (8 - n)) ** 0.5)),
        "attention": (lambda n: of_attention(n / 8), lambda n: (1, (n / (8 - n)) ** 0.5)),
        "exponential_": (lambda n: x.exponential_(n), lambda n: (1 / n, 1 / n)),
        "geometric_": (lambda n: x.geometric_(1 / (1 + n)), lambda n: (1 + n, (n * n + n) ** 0.5)),
        "randint": (
            lambda n: torch.randint(int(8 * n), (4096,), device="webgpu").float(),
            lambda n: ((8 * n - 1) / 2, ((64 * n * n - 1) / 12) ** 0.5),
        ),
        "randint from": (
            lambda n: torch.randint(-int(4 * n), int(4 * n), (4096,), device="webgpu").float(),
            lambda n: (-0.5, ((64 * n * n - 1) / 12) ** 0.5),
        ),
    }  # fmt: skip
    for name, (draw, moments) in cases.items():
        for k, n in enumerate((1.5, 2.5, 3.5, 4.5)):
            before = counters.kernels_compiled
            drawn = draw(n)
            assert k < 2 or counters.kernels_compiled == before, (name, n)
            mean, deviation = moments(n)
            drawn = drawn.cpu()
            assert abs(drawn.mean() - mean) < 5 * deviation / 64, (name, n)
            assert abs(drawn.std() - deviation) < 0.15 * deviation, (name, n)


def test_layers_of_any_width() -> None:
    before = counters.kernels_compiled
    with torch.device("webgpu"):
        for width in range(8, 168, 4):
            nn.Linear(width, 16)
    assert counters.kernels_compiled - before <= 12  # for classes of sizes


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_lists_of_any_length(join: Callable[..., torch.Tensor]) -> None:
    """A list that grows compiles a kernel for each length up to a bound, and none beyond."""
    x = [torch.full((2,), float(k)) for k in range(36)]
    on_device = [row.to("webgpu") for row in x]
    before = counters.kernels_compiled
    for length in range(3, 37):
        got = join(on_device[:length], -1)
        torch.testing.assert_close(got.cpu(), join(x[:length], -1))
        if length == 18:
            assert counters.kernels_compiled - before <= 24
            before = counters.kernels_compiled
    # Not 18: of two groups and of three, the last one is of 1, 2, 3 or 4 (two classes of sizes).
    assert counters.kernels_compiled - before <= 8
    with pytest.raises(RuntimeError, match=r"got 1 and 2|at entry 17"):
        join([*on_device[:17], torch.zeros(1, 3, device="webgpu")])
