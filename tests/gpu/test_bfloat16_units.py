"""Products of bfloat16 in matrix units of f16, whose exponents are fewer: nothing may be lost.

Where there are no matrix units, invocations compute their parts (`test_matrix_units`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_webgpu_compile import counters
from torch_webgpu_compile.codegen.kernels import contraction
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling
from torch_webgpu_compile.plan import cache as plan_cache

# Few products of units in a pass: a driver may end loops after 65,535 iterations, and tiles of all
# exponents take 81 passes.
TILING = UnitsTiling(Unit(8, 8, 8), "bf16", 32, 32, 32, 8, 2, 2, buffers=1)
SEVERAL = UnitsTiling(Unit(8, 8, 8), "bf16", 32, 32, 64, 8, 2, 2, buffers=2, drained=2)

M, K, N = 40, 20, 36


@pytest.fixture(autouse=True)
def _tiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are remembered by what they compute, not by a patched choice."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    monkeypatch.setattr(contraction, "units_tiling", lambda *_: TILING)
    torch._dynamo.reset()
    counters.reset()
    plan_cache.clear()
    yield
    plan_cache.clear()


def spread(rows: int, columns: int, low: int, high: int) -> Tensor:
    """Numbers whose exponents are any of a range."""
    return (torch.rand(rows, columns) + 1) * torch.exp2(torch.randint(low, high, (rows, columns)))


def factors(m: int, k: int, n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """What is multiplied, by what it is about."""
    torch.manual_seed(0)
    a, b = torch.randn(m, k), torch.randn(k, n)
    found = {"normal numbers": (a, b), "zeros": (a * 0, b), "half zeros": (a.relu(), b.relu())}

    left, right = a.clone(), b.clone()
    left[3] = 0
    left[3, 5] = 2.0**-40
    right[:, 9] = 0
    right[7, 9] = -(2.0**-50)
    found["a row and a column with nothing but one small number"] = left, right

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[0, 0], left[3, 7], left[4, 7] = 1, 2.0**-60, 1
    right[0, 0], right[7, 9], right[7, 8] = 1, 2.0**-60, 1
    found["a small number times a small one"] = left, right

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[:, 0], left[:, 1], right[1] = 1e10, 1e-5, 1
    found["small beside large"] = left, right
    left, right = a * 1e-9, b.clone()
    left[::2] *= 1e12
    right[:, ::3] *= 1e-13
    found["rows and columns of their own scales"] = left, right

    grows = torch.exp2(torch.arange(k) * 4.0)
    found["larger in each step"] = a * grows, b / grows.unsqueeze(1)
    found["larger in each step on both sides"] = a * grows, b * grows.sqrt().unsqueeze(1)
    found["smaller in each step"] = a / grows, b

    left, right = torch.zeros(m, k), torch.zeros(k, n)
    left[0, 0] = right[0, 0] = 1
    left[1, 16], right[17, 1] = 2.0**120, 2.0**120
    found["sums that would be lost when scales grow"] = left, right

    left = torch.zeros(m, k)
    left[0, 0], left[1, 8:12], left[6, 8:12] = 1, 2.0**40, 2.0**-10
    found["small in the step in which others are large"] = left, b
    found["rows of all scales"] = a * torch.exp2(torch.linspace(-120, 120, m)).unsqueeze(1), b

    for high in (20, 60):
        name = f"exponents from -{high} to {high}"
        found[name] = spread(m, k, -high, high), -spread(k, n, -high, high)
    found["all exponents on one side"] = spread(m, k, -126, 127), spread(k, n, -30, -10)
    found["products that are too large"] = a.abs() * 2.0**100, b.abs() * 2.0**100
    found["products that are too small"] = a * 2.0**-100, b * 2.0**-100

    left, right = a.clone(), b.clone()
    left[4, 6], left[9, 18], left[20, 3], left[21, 3:5] = torch.inf, torch.nan, -torch.inf, torch.inf
    right[6, 2], right[6, 7], right[11, 11] = 0, 2.0**-60, -torch.inf
    found["infinities and NaN"] = left, right
    found["infinities and NaN among all exponents"] = (
        torch.where(left.isfinite(), spread(m, k, -60, 60), left),
        torch.where(right.isfinite() & (right != 0), spread(k, n, -30, 30), right),
    )
    return {name: (x.bfloat16(), y.bfloat16()) for name, (x, y) in found.items()}


def check(name: str, got: Tensor, a: Tensor, b: Tensor) -> None:
    """Compares a product; of sums that end as infinities or NaN, which they are."""
    wanted = a.float() @ b.float()
    exact = a.double() @ b.double()
    terms = a.double().abs() @ b.double().abs()
    # The result's rounding; that of sums in f32; what f32 has no normal number for.
    bound = 2.0**-8 * exact.abs() + 2.0**-18 * terms + 2.0**-125
    finite = wanted.isfinite() & (exact.abs() < 3e38)
    wrong = (got.double() - exact).abs() > bound
    wrong = torch.where(finite, wrong, got.float().nan_to_num(7) != wanted.nan_to_num(7))
    assert not wrong.any(), f"{name}: {got[wrong][:4]}, not {wanted[wrong][:4]}"




@pytest.mark.parametrize("most_missed", [64, 1], ids=["noted", "computed again"])
@pytest.mark.parametrize("transposed", [False, True], ids=["as they are", "transposed"])
@pytest.mark.parametrize("sizes", [(M, K, N), (M - 1, K - 1, N - 1)], ids=["by fours", "by ones"])
def test_exponents(
    sizes: tuple[int, int, int],
    transposed: bool,
    most_missed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contraction, "MOST_MISSED", most_missed)
    product = torch.compile(torch.mm, backend="webgpu", fullgraph=True, dynamic=False)
    for name, (a, b) in factors(*sizes).items():
        if transposed:
            a, b = a.t().contiguous().t(), b.t().contiguous().t()
        check(name, product(a, b), a, b)
    assert not counters.fallbacks


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "several of one": lambda a, b, c: (a @ b, a @ c[:, :16]),
    "a pair": lambda a, b, c: (a @ b) * torch.tanh(a @ c),
    "a batch": lambda a, b, c: torch.bmm(torch.stack([a, a[:, :20] * 2]), torch.stack([b, c])),
    "computed": lambda a, b, c: (a.float() * 3).bfloat16() @ (b + c),
    "with a prologue and an epilogue": lambda a, b, c: (a.relu() @ b) * c[:1].exp(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_missed_elements_in_groups(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "a pair":
        monkeypatch.setattr(contraction, "units_tiling", lambda *_: SEVERAL)
    torch.manual_seed(0)
    a, b, c = (torch.randn(s).bfloat16() for s in ((M, K), (K, N), (K, N)))
    # Rows and columns that are small alone, so that what is missed is all there is of them.
    a[5] *= 2.0**-40
    b[:, 33] *= 2.0**-35
    c[:, 7] *= 2.0**-45
    call = CALLS[name]
    compiled = torch.compile(call, backend="webgpu", fullgraph=True, dynamic=dynamic)
    wanted = torch.utils._pytree.tree_leaves(call(a, b, c))
    for got, want in zip(torch.utils._pytree.tree_leaves(compiled(a, b, c)), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=0)
    assert not counters.fallbacks
