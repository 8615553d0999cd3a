"""Products in matrix units, which no software adapter has: there, invocations compute their parts.

That differs in how matrices of a subgroup are spelled, not in what is loaded and stored where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilations import TARGET, compile_function
from tests.providers import device_in_use, require_float16
from tests.tint import tint
from torch_webgpu_compile import counters
from torch_webgpu_compile import target as target_module
from torch_webgpu_compile.codegen.kernels import contraction
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling, units_fit
from torch_webgpu_compile.plan import cache as plan_cache

UNITS = [Unit(8, 8, 8), Unit(8, 16, 16), Unit(16, 16, 16)]

SMALL, WIDE, LARGE = UNITS
TILINGS = [
    UnitsTiling(LARGE, "f16", 32, 64, 64, 32, 2, 2, buffers=2, drained=2),
    UnitsTiling(LARGE, "f16", 32, 32, 64, 16, 1, 2, buffers=1),
    UnitsTiling(WIDE, "f16", 32, 32, 64, 32, 4, 1, buffers=1, drained=2),
    UnitsTiling(SMALL, "f16", 16, 32, 32, 32, 2, 1, buffers=2, drained=2),
    UnitsTiling(SMALL, "f32", 32, 64, 32, 8, 4, 2, buffers=1),
]


def half(*sizes: int) -> Tensor:
    return torch.randn(sizes).half()


CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {}


def case(name: str, function: Callable[..., Any], *arguments: Tensor) -> None:
    CALLS[name] = function, arguments


torch.manual_seed(0)
case("whole tiles", torch.mm, half(64, 64), half(64, 64))
case("rows, columns and terms left over", torch.mm, half(70, 37), half(37, 83))
case("transposed", lambda a, b: a.t() @ b.t(), half(40, 68), half(76, 40))
case("the other transposed", lambda a, b: a @ b.t(), half(68, 40), half(76, 40))
case("a batch", torch.bmm, half(3, 40, 24), half(3, 24, 36))
case(
    "bias and activation",
    lambda a, b, c: F.gelu(F.linear(a, b, c)),
    half(40, 32),
    half(68, 32),
    half(68),
)
case(
    "several of one",
    lambda a, b, c, d: (a @ b, a @ c, a @ d),
    half(68, 48),
    half(48, 64),
    half(48, 32),
    half(48, 96),
)
case("a pair", lambda a, b, c: F.silu(a @ b) * (a @ c), half(68, 48), half(48, 72), half(48, 72))
case(
    "rows that indices choose",
    lambda a, b, c: F.embedding(b, a) @ c * b.unsqueeze(-1),
    half(100, 64),
    torch.randint(100, (70,)),
    half(64, 96),
)
case(
    "a convolution",
    lambda a, b: F.conv2d(a, b, stride=2, padding=1),
    half(2, 12, 19, 23),
    half(40, 12, 3, 3),
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are remembered by what they compute, not by a patched choice."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    counters.reset()
    plan_cache.clear()
    yield
    plan_cache.clear()


@pytest.mark.rotates(16)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_products(
    tiling: UnitsTiling, name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiling.factor == "f16":
        require_float16()
    target = device_in_use().target
    used = []

    def choose(group: Any, problem: Any, target: Any) -> UnitsTiling | None:
        found = tiling if units_fit(tiling, problem, target) else None
        used.append(found)
        return found

    monkeypatch.setattr(contraction, "units_tiling", choose)
    function, arguments = CALLS[name]
    if tiling.factor == "f32":
        arguments = tuple(a.float() if a.is_floating_point() else a for a in arguments)
    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=dynamic)
    got = compiled(*arguments)
    wanted = function(*(a.double() if a.is_floating_point() else a for a in arguments))
    # Sums are in f32, in another order; of f16 factors the result is rounded, too: by 2⁻¹¹ of it.
    tolerance = 1e-4 if tiling.factor == "f32" else 4e-3
    torch.testing.assert_close(
        torch.utils._pytree.tree_map(Tensor.double, got), wanted, rtol=tolerance, atol=tolerance
    )
    assert not counters.fallbacks
    if tiling.workgroup <= target.max_workgroup_invocations:
        assert all(found is not None for found in used) or name == "a pair"
    assert used


@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_tint_accepts_the_kernels(name: str, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "f16", "f32", unit.m, unit.n, unit.k
    monkeypatch.setattr(target_module, "MATRIX_KERNELS", frozenset({config}))
    target = replace(
        TARGET,
        features=frozenset({"shader-f16", "subgroup", "chromium-experimental-subgroup-matrix"}),
        subgroup_sizes=(32, 32),
        max_workgroup_nbytes=48 << 10,
        subgroup_matrix_configs=(config,),
    )
    function, arguments = CALLS[name]
    compiled = compile_function(function, *arguments, target=target)
    kernels = [k.wgsl for k in compiled.plan.kernels if "subgroupMatrix" in k.wgsl]
    assert kernels
    for kernel in kernels:
        assert not tint().error(kernel)


def test_tint_refuses_what_is_no_kernel() -> None:
    assert "unresolved value" in tint().error("@compute @workgroup_size(1) fn main() { _ = n; }")
