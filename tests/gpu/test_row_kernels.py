"""Rows that are too long for registers, against eager PyTorch, special values included."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from torch_webgpu_compile.ir import rows
from torch_webgpu_compile.ir.rows import RowTiling
from torch_webgpu_compile.plan import cache as plan_cache

pytestmark = pytest.mark.rotates(6)

LONG = 33_003


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    torch.manual_seed(0)


def special_rows(n: int) -> torch.Tensor:
    """Rows with NaN and infinities at the start, in the middle and at the end; empty masks."""
    x = torch.randn(14, n) * 10
    x[1] = -math.inf
    x[2, n // 2] = math.inf
    x[3, 5] = math.nan
    x[4, : n - 1] = -math.inf
    x[5] = torch.finfo(torch.float32).min
    x[6, 3], x[6, 7] = math.nan, math.inf
    x[7] = math.inf
    x[8, : n // 2] = -math.inf
    x[9] *= 1e30
    x[10] = torch.arange(n) * 0.01
    x[11] = torch.arange(n) * -0.01
    x[12, n - 1] = math.inf
    x[13, 0], x[13, n - 1] = -math.inf, math.nan
    return x


FUNCTIONS = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: (torch.logsumexp(x, -1), x.amax(-1)),
    "written": lambda x: torch.exp(x - x.amax(-1, keepdim=True)).sum(-1),
    "of a chain": lambda x: torch.softmax(torch.tanh(x * 0.1) * 9 + 1, -1),
    "columns": lambda x: torch.logsumexp(x.t(), 0),
    "strided": lambda x: torch.logsumexp(x[1:, 3::2], -1),
    # Next to numbers like 1e30 the shift is lost, unless a driver makes -t of a - (a + t).
    "with a later shift": lambda x: torch.exp(
        (y := x.clamp(-8, 30))
        - (y.amax(-1, keepdim=True) + (y - y.mean(-1, keepdim=True)).tanh().amax(-1, True))
    ).sum(-1),
    "with a second reduction": lambda x: (x.logsumexp(-1), x.clamp(-5, 5).abs().sum(-1)),
}


def check(function, *arguments, **tolerance):
    got = torch.compile(function, backend="webgpu", dynamic=False)(*arguments)
    torch.testing.assert_close(got, function(*arguments), equal_nan=True, **tolerance)


# One unit in the last place of a shift near 31 is 1.9e-6 of its exponential: that much may differ
# where a mean was added in another order, on the CPU (1.0e-6 off in float64) as here (-1.2e-6).
TOLERANCES = {"with a later shift": {"rtol": 4e-6, "atol": 1e-5}}


@pytest.mark.parametrize("length", [LONG, 40_960])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_pass(name, length):
    check(FUNCTIONS[name], special_rows(length), **TOLERANCES.get(name, {}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "logsumexp"])
def test_one_pass_of_half_precision(name, dtype):
    check(FUNCTIONS[name], special_rows(LONG).to(dtype))


@pytest.mark.parametrize(
    "tiling",
    [
        RowTiling(64, 2, True, 1, None, 8),
        RowTiling(1, 16, True, 4, None),
        RowTiling(16, 8, False, 1, None),
        RowTiling(128, 1, True, 4, None, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 3, 100, 1000])
def test_loops_of_any_tiling(tiling, length, monkeypatch):
    if length % tiling.lanes:
        length *= tiling.lanes
    monkeypatch.setattr(rows, "choose_row_tiling", lambda *_: tiling)

    def function(x):
        return torch.softmax(x, -1), torch.logsumexp(x * 2, -1), x.sum(-1)

    plan_cache.clear()  # plans are remembered by what they compute, not by a patched choice
    check(function, torch.randn(13, length) * 5, rtol=1e-5, atol=1e-4)
    plan_cache.clear()


@pytest.mark.parametrize("rows", [1, 5])
def test_dynamic_rows(rows):
    compiled = torch.compile(
        lambda x: (torch.logsumexp(x, -1), torch.softmax(x, -1)), backend="webgpu", dynamic=True
    )
    for length in (2, 700, 5000):
        x = torch.randn(rows + 1, length) * 10
        x[0, : length - 1] = -math.inf
        wanted = torch.logsumexp(x, -1), torch.softmax(x, -1)
        torch.testing.assert_close(compiled(x), wanted)


def test_empty_rows():
    check(lambda x: torch.logsumexp(x, -1), torch.zeros(3, 0))
    check(lambda x: torch.softmax(x, -1), torch.zeros(0, LONG))
    check(lambda x: torch.softmax(x, -1), torch.tensor(3.0))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction_name", ["mean", "sum", "none"])
def test_cross_entropy(reduction_name, smoothing):
    logits = torch.randn(9, LONG) * 5
    target = torch.randint(0, LONG, (9,))
    target[4] = -100
    weight = torch.rand(LONG)

    def function(x, t, w):
        options = {"reduction": reduction_name, "label_smoothing": smoothing}
        return F.cross_entropy(x, t, **options), F.cross_entropy(x, t, w, **options)

    check(function, logits, target, weight)


def test_gathers_of_computed_values():
    table, i = torch.randn(20, 12), torch.randint(0, 20, (7, 3))
    check(lambda t, i: (F.embedding(i, t * 2 + 1), t[i].sum()), table, i)
    check(lambda t, i: torch.exp(t).t().contiguous()[i % 12], table, i)
    check(lambda t, i: (t * 3).gather(1, i.view(1, -1) % 12), table, i)
    check(lambda t, i: (torch.arange(20) * 2 + t[:, 0].long())[i], table, i)
    check(lambda t, i: (i * 2)[(i + 1)[:, 0] % 7], table, i)


def test_cross_entropy_gradient():
    logits = torch.randn(5, LONG, requires_grad=True)
    other = logits.detach().clone().requires_grad_()
    target = torch.randint(0, LONG, (5,))
    torch.compile(F.cross_entropy, backend="webgpu", dynamic=False)(logits, target).backward()
    F.cross_entropy(other, target).backward()
    torch.testing.assert_close(logits.grad, other.grad)
