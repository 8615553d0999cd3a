"""Products in matrix units, which no software adapter has: there, invocations compute their parts.

That differs in how matrices of a subgroup are spelled, not in what is loaded and stored where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilations import TARGET, compile_function
from tests.providers import require_float16, target_for_units
from tests.tint import misplaced, tint
from torch_webgpu_compile import counters
from torch_webgpu_compile import target as targets
from torch_webgpu_compile.codegen.tilings import contraction
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling, units_fit
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.target import MatrixConfig, Target

UNITS = [Unit(8, 8, 8), Unit(8, 16, 16), Unit(16, 16, 16)]

SMALL, WIDE, LARGE = UNITS
OF_BYTES = Unit(16, 16, 32)
TILINGS = [
    UnitsTiling(LARGE, "f16", 32, 64, 64, 32, 2, 2, drained=2),
    UnitsTiling(LARGE, "f16", 32, 32, 64, 16, 1, 2),
    UnitsTiling(WIDE, "f16", 32, 32, 64, 32, 4, 1, drained=2),
    UnitsTiling(SMALL, "f16", 16, 32, 32, 32, 2, 1, drained=2),
    UnitsTiling(SMALL, "f32", 32, 64, 32, 8, 4, 2),
    UnitsTiling(LARGE, "bf16", 32, 64, 64, 32, 2, 2),
    UnitsTiling(WIDE, "bf16", 32, 32, 64, 16, 1, 2),
]
BYTE_TILINGS = [
    UnitsTiling(OF_BYTES, "i8", 32, 64, 64, 16, 2, 2, drained=2),
    UnitsTiling(OF_BYTES, "i8", 32, 32, 64, 8, 1, 2),
]
# How far results may be from sums of products: f32 sums in another order, the result rounded to 11
# or to 8 bits.
TOLERANCES = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


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


def grouped(levels: Tensor, scales: Tensor) -> Tensor:
    """Of levels (N, K) and float16 scales (groups, N), weights in float16."""
    by_group = levels.half().reshape(len(levels), len(scales), -1)
    return (by_group * scales.t().unsqueeze(-1)).flatten(1)


def of_pairs(x: Tensor, pairs: Tensor, scales: Tensor) -> Tensor:
    shifts = torch.arange(28, 20, -4, dtype=torch.int32, device=pairs.device)
    return F.linear(x, grouped(((pairs[..., None].int() << shifts) >> 28).flatten(1), scales))


def of_words(x: Tensor, words: Tensor, scales: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return F.linear(x, grouped(((words[..., None] >> shifts) & 15).flatten(1) - 8, scales))


def integers(*sizes: int, dtype: torch.dtype = torch.int8) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, sizes, dtype=dtype)


# Rows of a whole tile and of a part, and a part of an access along the inner dimension.
PACKED_CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "scaled bytes": (
        lambda x, w, s: F.linear(x, w.half()) * s,
        (half(70, 64), integers(68, 64), half(68)),
    ),
    "bytes in groups": (
        lambda x, w, s: F.linear(x, grouped(w, s)),
        (half(70, 96), integers(68, 96), half(6, 68) / 64),
    ),
    "bytes by columns": (
        lambda x, w, s: x @ (w.half() * s),
        (half(40, 36), integers(36, 68), half(68) / 64),
    ),
    "pairs": (of_pairs, (half(70, 128), integers(68, 64), half(8, 68))),
    "pairs, and a part of an access": (of_pairs, (half(40, 48), integers(36, 24), half(3, 36))),
    "words": (of_words, (half(70, 128), integers(68, 16, dtype=torch.int32), half(8, 68))),
    "a gated pair": (
        lambda x, w, v, s: F.silu(of_pairs(x, w, s)) * of_pairs(x, v, s),
        (half(70, 64), integers(72, 32), integers(72, 32), half(4, 72) / 8),
    ),
}

BYTE_CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "whole tiles": (torch._int_mm, (integers(64, 128), integers(128, 64))),
    "a linear layer": (lambda a, w: torch._int_mm(a, w.t()), (integers(70, 96), integers(68, 96))),
    "accesses of words": (lambda a, w: torch._int_mm(a, w.t()), (integers(9, 36), integers(7, 36))),
    "few rows": (lambda a, w: torch._int_mm(a, w.t()), (integers(7, 272), integers(70, 272))),
    "all left over": (torch._int_mm, (integers(70, 37), integers(37, 83))),
    "transposed": (lambda a, b: torch._int_mm(a.t(), b), (integers(45, 68), integers(45, 76))),
    "one term": (torch._int_mm, (integers(40, 1), integers(1, 50))),
    "sums that wrap": (torch.mm, (integers(40, 80), integers(80, 72))),
    "a batch": (torch.bmm, (integers(3, 40, 32), integers(3, 32, 36))),
    "unsigned": (
        torch.mm,
        (integers(40, 80, dtype=torch.uint8), integers(80, 72, dtype=torch.uint8)),
    ),
    "scales and activations": (
        lambda a, w, s, t: F.silu(torch._int_mm(a, w.t()) * s * t),
        (integers(70, 64), integers(68, 64), torch.rand(70, 1) / 64, torch.rand(68) / 64),
    ),
    "of activations that are quantized": (
        lambda x, w: torch._int_mm((x * 40).round().clamp(-128, 127).to(torch.int8), w.t()),
        (torch.randn(70, 64), integers(68, 64)),
    ),
    "several of one": (
        lambda a, b, c: (torch._int_mm(a, b), torch._int_mm(a, c)),
        (integers(68, 48), integers(48, 64), integers(48, 32)),
    ),
    "a pair": (
        lambda a, b, c: torch._int_mm(a, b.t()) * torch._int_mm(a, c.t()),
        (integers(68, 48), integers(72, 48), integers(72, 48)),
    ),
    "rows that indices choose": (
        lambda a, i, b: torch._int_mm(a[i], b.t()),
        (integers(100, 64), torch.randint(100, (70,)), integers(66, 64)),
    ),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are remembered by what they compute, not by a patched choice."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    counters.reset()
    plan_cache.clear()
    yield
    plan_cache.clear()


def in_dtype(arguments: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(a.to(dtype) if a.is_floating_point() else a for a in arguments)


@pytest.mark.rotates(24)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_products(
    tiling: UnitsTiling, name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiling.type == "f16":
        require_float16()
    target = target_for_units(tiling, monkeypatch)
    used = []

    def choose(group: Any, problem: Any, target: Any) -> UnitsTiling | None:
        found = tiling if units_fit(tiling, problem, target) else None
        used.append(found)
        return found

    monkeypatch.setattr(contraction, "units_tiling", choose)
    function, arguments = CALLS[name]
    arguments = in_dtype(arguments, DTYPES[tiling.factor])
    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=dynamic)
    got = compiled(*arguments)
    wanted = function(*(a.double() if a.is_floating_point() else a for a in arguments))
    tolerance = TOLERANCES[tiling.factor]
    torch.testing.assert_close(
        torch.utils._pytree.tree_map(Tensor.double, got), wanted, rtol=tolerance, atol=tolerance
    )
    assert not counters.fallbacks
    if tiling.workgroup <= target.max_workgroup_invocations:
        assert all(found is not None for found in used) or name == "a pair"
    assert used


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", PACKED_CALLS)
@pytest.mark.parametrize("tiling", [replace(TILINGS[0], drained=1), TILINGS[1]], ids=str)
def test_products_of_packed_weights(
    tiling: UnitsTiling, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dequantized where they are read: no dispatch does only that."""
    require_float16()
    target_for_units(tiling, monkeypatch)
    monkeypatch.setattr(contraction, "units_tiling", lambda *_: tiling)
    monkeypatch.setattr(Target, "matrix_config", lambda *types: (*types[1:3], 16, 16, 16))
    function, arguments = PACKED_CALLS[name]
    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=False)
    compiled(*arguments)
    before = counters.dispatches
    got = compiled(*arguments)
    assert counters.dispatches == before + 1
    torch.testing.assert_close(got, function(*arguments), rtol=4e-3, atol=4e-2)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", BYTE_CALLS)
@pytest.mark.parametrize("tiling", [None, *BYTE_TILINGS], ids=str)
def test_products_of_bytes(
    tiling: UnitsTiling | None, name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without matrix units."""
    used = []

    def choose(group: Any, problem: Any, target: Any) -> UnitsTiling | None:
        used.append(problem.factor)
        wanted = None if tiling is None else replace(tiling, factor=problem.factor)
        return wanted if wanted is not None and units_fit(wanted, problem, target) else None

    monkeypatch.setattr(contraction, "units_tiling", choose)
    if tiling is not None:
        target_for_units(tiling, monkeypatch)
        monkeypatch.setattr(contraction, "has_few_rows", lambda problem: False)
    function, arguments = BYTE_CALLS[name]
    compiled = torch.compile(function, backend="webgpu", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*arguments), function(*arguments))
    assert not counters.fallbacks
    assert set(used) <= {"i8", "u8"}


@pytest.mark.parametrize("name", PACKED_CALLS)
def test_tint_accepts_the_kernels_of_packed_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call loads whole accesses of 16 bytes, where there are any."""
    texts = check_with_tint(monkeypatch, (("f16", "f32", 16, 16, 16),), *PACKED_CALLS[name])
    are_whole = name not in ("bytes by columns", "pairs, and a part of an access")
    assert ("-> array<vec4<f16>, " in "".join(texts)) == are_whole


@pytest.mark.parametrize("name", BYTE_CALLS)
def test_tint_accepts_the_kernels_of_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = OF_BYTES.m, OF_BYTES.n, OF_BYTES.k
    configs: tuple[MatrixConfig, ...] = ("i8", "i32", *sizes), ("u8", "u32", *sizes)
    check_with_tint(monkeypatch, configs, *BYTE_CALLS[name], are_few=name == "few rows")


@pytest.mark.rotates(4)
@pytest.mark.parametrize("factor", ["f16", "bf16", "bf16, shifted"])
@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_tint_accepts_the_kernels(
    name: str, unit: Unit, factor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, arguments = CALLS[name]
    dtype, *shifted = factor.split(", ")
    monkeypatch.setattr(cost, "shifts_pay", lambda *_: bool(shifted))
    arguments = in_dtype(arguments, DTYPES[dtype])
    units: tuple[MatrixConfig, ...] = (("f16", "f32", unit.m, unit.n, unit.k),)
    kernels = check_with_tint(monkeypatch, units, function, arguments)
    # Windows of an image are none of a matrix, of which all elements are read once.
    assert any("unshifted" in kernel for kernel in kernels) == (
        bool(shifted) and name != "a convolution"
    )


def check_with_tint(
    monkeypatch: pytest.MonkeyPatch,
    configs: tuple[MatrixConfig, ...],
    function: Callable[..., Any],
    arguments: tuple[Tensor, ...],
    are_few: bool = False,
) -> list[str]:
    """A function's kernels, which Tint accepts, and which have matrix units but for few rows."""
    kernels_of_all = dict.fromkeys(targets.MATRIX_KERNELS, frozenset(configs))
    monkeypatch.setattr(targets, "MATRIX_KERNELS", kernels_of_all)
    target = replace(
        TARGET,
        features=frozenset({"shader-f16", "subgroup", "chromium-experimental-subgroup-matrix"}),
        subgroup_sizes=(32, 32),
        max_workgroup_nbytes=48 << 10,
        subgroup_matrix_configs=configs,
    )
    compiled = compile_function(function, *arguments, target=target)
    kernels = [kernel.wgsl for kernel in compiled.plan.kernels]
    assert any("subgroupMatrix" in kernel for kernel in kernels) != are_few
    for kernel in kernels:
        assert not tint().error(kernel)
    return kernels


def test_tint_refuses_what_is_no_kernel() -> None:
    assert "unresolved value" in tint().error("@compute @workgroup_size(1) fn main() { _ = n; }")


def test_matrices_begin_at_multiples_of_16_bytes() -> None:
    memory = "var<workgroup> a: array<f16, 512>;\nvar<workgroup> last: {};\n// subgroupMatrixLoad"
    assert misplaced(memory.format("atomic<i32>")) == "last has 4 bytes"
    assert misplaced(memory.format("array<vec2<u32>, 3>")) == "last has 24 bytes"
    assert not misplaced(memory.format("array<atomic<u32>, 4>"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [3072, 50257])
def test_parts_of_a_product_are_in_units(
    k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they do not divide the inner dimension, and are whole tiles."""
    monkeypatch.setattr(cost, "shifts_pay", lambda *_: True)
    monkeypatch.setattr(cost, "inner_part_counts", lambda *_, **__: range(5, 6))
    units = (("f16", "f32", 16, 16, 16),)
    factors = torch.ones(96, k).to(dtype), torch.ones(k, 96).to(dtype)
    kernels = check_with_tint(monkeypatch, units, torch.mm, factors)
    product = next(kernel for kernel in kernels if "subgroupMatrixMultiplyAccumulate" in kernel)
    assert ("unshifted" in product) == (dtype is torch.bfloat16)
    (load,) = re.findall(r"fn load_lhs\(.*?\n}", product, re.DOTALL)
    assert "opaque" not in load
    assert "(!(k <" not in load


def test_a_factor_on_both_sides_has_one_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "shifts_pay", lambda *_: True)
    units = (("f16", "f32", 16, 16, 16),)
    x = torch.ones(256, 64).bfloat16()
    kernels = check_with_tint(monkeypatch, units, lambda x: x @ x.t(), (x,))
    assert len(kernels) == 3  # the shifts, the product, and what f16 does not hold
