"""Products of bfloat16 in matrix units of f16, whose exponents are fewer: nothing may be lost.

Where there are no matrix units, invocations compute their parts (`test_matrix_units`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exponents import check, factors
from tests.providers import require_float16, target_for_units
from torch_webgpu_compile import counters
from torch_webgpu_compile.codegen.kernels import contraction as products
from torch_webgpu_compile.codegen.tilings import contraction
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.target import Target

# Few products of units in a pass: a driver may end loops after 65,535 iterations, and tiles of all
# exponents take 81 passes.
TILING = UnitsTiling(Unit(8, 8, 8), "bf16", 32, 32, 32, 8, 2, 2)
SEVERAL = UnitsTiling(Unit(8, 8, 8), "bf16", 32, 32, 64, 8, 2, 2, drained=2)

M, K, N = 40, 20, 36


def use(tiling: UnitsTiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products use a tiling, in f16 where they have shifts."""

    def choose(group: Any, problem: Any, target: Any) -> UnitsTiling:
        return replace(tiling, factor=problem.factor)

    monkeypatch.setattr(contraction, "units_tiling", choose)


@pytest.fixture(params=[False, True], ids=["unknown", "shifted"])
def has_shifts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products know the exponents of their factors."""
    if request.param:
        config = TILING.config
        monkeypatch.setattr(Target, "matrix_config", lambda *_: config)
        monkeypatch.setattr(cost, "shifts_pay", lambda *_: True)
        monkeypatch.setattr(cost, "inner_part_counts", lambda *_, **__: range(1, 2))
    return bool(request.param)


@pytest.fixture(autouse=True)
def _tiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are remembered by what they compute, not by a patched choice; units multiply f16."""
    require_float16()
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    use(TILING, monkeypatch)
    target_for_units(TILING, monkeypatch)
    torch._dynamo.reset()
    counters.reset()
    plan_cache.clear()
    yield
    plan_cache.clear()


@pytest.mark.rotates(4)
@pytest.mark.parametrize("most_missed", [64, 1], ids=["noted", "computed again"])
@pytest.mark.parametrize("transposed", [False, True], ids=["as they are", "transposed"])
@pytest.mark.parametrize("sizes", [(M, K, N), (M - 1, K - 1, N - 1)], ids=["by fours", "by ones"])
def test_exponents(
    sizes: tuple[int, int, int],
    transposed: bool,
    most_missed: int,
    has_shifts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "MOST_MISSED", most_missed)
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


@pytest.mark.rotates(4)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_missed_elements_in_groups(
    name: str, dynamic: bool, has_shifts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "a pair":
        use(SEVERAL, monkeypatch)
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
        if name == "computed":  # inline, and not rounded as PyTorch does it
            want = want.where((got - want).abs() > call(a.abs(), b.abs(), c.abs()) / 128, got)
        torch.testing.assert_close(got, want, rtol=3e-2, atol=0)
    assert not counters.fallbacks
