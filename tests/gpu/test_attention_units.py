"""Attention in matrix units, which no software adapter has: there, invocations compute their parts.

That differs in how matrices of a subgroup are spelled, not in what is loaded and stored where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilations import TARGET, compile_function
from tests.providers import require_float16, target_for_units
from tests.tint import tint
from torch_webgpu_compile import counters
from torch_webgpu_compile import target as target_module
from torch_webgpu_compile.codegen.tilings import choose as choice
from torch_webgpu_compile.codegen.tilings.attention_units import (
    AttentionGradientUnitsTiling,
    AttentionUnitsTiling,
    attention_gradient_units_fit,
    attention_units_fit,
    choose_attention_units_tiling,
)
from torch_webgpu_compile.codegen.tilings.units import Unit
from torch_webgpu_compile.ir.factors import common_factor
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.symbolic.sizes import as_expr
from torch_webgpu_compile.target import MatrixConfig, Target
from torch_webgpu_compile.torch_ops.elementwise import Reference, Step
from torch_webgpu_compile.torch_ops.score_functions import ScoreFunction

SMALL, WIDE, LARGE = Unit(8, 8, 8), Unit(8, 16, 16), Unit(16, 16, 16)
TILINGS = [
    AttentionUnitsTiling(LARGE, "f16", 32, 2, 2, 32, 1),
    AttentionUnitsTiling(LARGE, "f16", 32, 4, 1, 32, 1),
    AttentionUnitsTiling(LARGE, "f16", 64, 2, 1, 64, 1),
    AttentionUnitsTiling(WIDE, "f16", 32, 3, 2, 16, 2),
    AttentionUnitsTiling(SMALL, "f16", 16, 2, 2, 16, 1),
]
KINDS = ["none", "causal", "bool", "lowest", "float", "no key", "grouped", "growing", "written"]
KINDS += ["cache", "window", "capped"]  # where keys end or begin; a function of scores
SIZES = [(2, 70, 70, 32, 32), (1, 33, 100, 44, 40)]


CAPPED = ScoreFunction(
    (
        Step("div.Tensor", (Reference("score"), 3.0), "float32"),
        Step("tanh.default", (Reference("step", 0),), "float32"),
        Step("mul.Tensor", (Reference("step", 1), 3.0), "float32"),
    )
).text


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores between -3 and 3, and keys before the 30th without one."""
    bias = torch.where(torch.arange(k.shape[2], device=q.device) < 30, float("-inf"), 0.0)
    rest = bias, False, 0.4, None, 0.0, None, True, CAPPED
    return torch.ops.webgpu.attention.default(q, k, v, *rest)[0]  # type: ignore[no-any-return]


def in_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device).unsqueeze(1)
    keys = torch.arange(k.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, k, v, (keys <= at) & (keys > at - 12))


def attention_of(kind: str, sizes: tuple[int, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """A function and its arguments. ``sizes``: heads, queries, keys, head, value head."""
    heads, queries, keys, head, value_head = sizes
    torch.manual_seed(0)
    q, k = torch.randn(2, heads, queries, head).half(), torch.randn(2, heads, keys, head).half()
    v = torch.randn(2, heads, keys, value_head).half()
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float16).min
    mask = {
        "bool": causal & (torch.arange(keys) > 40),  # whole tiles without keys, and whole rows
        "lowest": torch.where(causal, 0.0, lowest).index_fill(0, torch.tensor([3]), lowest).half(),
        "float": torch.randn(queries, keys).half(),
        "no key": causal & (torch.arange(queries) != 5).unsqueeze(1),
    }.get(kind)
    if kind == "cache":

        def cached(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
            seen = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + at
            mask = torch.arange(k.shape[2], device=q.device) <= seen
            return F.scaled_dot_product_attention(q, k, v, mask)

        return cached, (q, k, v, torch.tensor(keys // 3))
    if kind == "grouped":
        q = q.repeat(1, 3, 1, 1)
    if kind == "growing":  # scores of later keys are far larger, and last of all infinite
        k = k * torch.linspace(0.2, 30, keys).unsqueeze(1).half()
        q[0, 0, 3] = torch.inf

    def fused(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        grouped = kind == "grouped"
        return F.scaled_dot_product_attention(
            q, k, v, *mask, is_causal=kind == "causal", enable_gqa=grouped
        )

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)).float() * 0.25
        scores = scores.masked_fill(~causal.to(q.device), -1e9)
        return torch.softmax(scores, -1).to(v.dtype) @ v

    function = {"written": written, "capped": capped, "window": in_a_window}.get(kind, fused)
    return function, (q, k, v, *(() if mask is None else (mask,)))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are remembered by what they compute, not by a patched choice."""
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    counters.reset()
    plan_cache.clear()
    yield
    plan_cache.clear()


def use(tiling: AttentionUnitsTiling, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes attention use a tiling where it fits; the tilings used."""
    target = target_for_units(tiling, monkeypatch)
    used: list[Any] = []

    def choose(node: Any, _target: Any) -> AttentionUnitsTiling | None:
        assert common_factor((node.query, node.key, node.value)) == "f16"
        sizes = int(node.sizes[4]), int(node.sizes[5])
        fits = attention_units_fit(tiling, sizes, target)
        used.append(tiling if fits else None)
        return used[-1]

    monkeypatch.setattr(choice, "attention_units_tiling", choose)
    return used


def check(
    tiling: AttentionUnitsTiling, kind: str, dynamic: bool, patch: pytest.MonkeyPatch
) -> None:
    require_float16()
    used = use(tiling, patch)
    patch.setattr(cost, "waits_for_key_end", lambda *_: True)
    for sizes in SIZES:
        function, arguments = attention_of(kind, sizes)
        torch._dynamo.reset()
        if dynamic:
            for x in arguments[:3]:
                torch._dynamo.maybe_mark_dynamic(x, 2)
        with torch.no_grad():
            compiled = torch.compile(function, backend="webgpu", fullgraph=True)
            got = compiled(*arguments)
            wanted = function(*(a.double() if a.is_floating_point() else a for a in arguments))
        # Probabilities are rounded to f16, by 2⁻¹¹ of each, and so is the result.
        torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert any(used)
    assert not counters.fallbacks


@pytest.mark.rotates(32)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_attention(
    tiling: AttentionUnitsTiling, kind: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(tiling, kind, dynamic, monkeypatch)


def test_sums_follow_maxima_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    check(TILINGS[0], "growing", False, monkeypatch)


def use_for_gradients(
    tiling: AttentionGradientUnitsTiling, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Makes gradients of attention use a tiling where it fits; the tilings used."""
    require_float16()
    target = target_for_units(tiling, monkeypatch)
    used: list[Any] = []

    def choose(node: Any, _target: Any) -> AttentionGradientUnitsTiling | None:
        assert common_factor((node.query, node.key, node.value, node.gradient)) == "f16"
        sizes, by_keys = (int(node.sizes[5]), int(node.sizes[6])), node.of == "keys"
        fits = attention_gradient_units_fit(tiling, sizes, by_keys, target)
        used.append(tiling if fits else None)
        return used[-1]

    monkeypatch.setattr(choice, "attention_gradient_units_tiling", choose)
    return used


def in_training(kind: str) -> tuple[Any, list[Tensor]]:
    """A function and leaves."""
    heads, queries, keys, head, value_head = 2, 40, 70, 32, 24
    torch.manual_seed(3)
    if kind in ("dropout", "written"):
        keys = queries
    sizes = (heads * 3 if kind == "grouped" else heads, queries, head), (heads, keys, head)
    leaves = [torch.randn(1, *size).half() for size in (*sizes, (heads, keys, value_head))]
    mask = torch.randn(queries, keys).half()
    mask = {"float": mask.masked_fill(mask < -1, -torch.inf), "bool": mask > 0}.get(kind)
    if mask is not None:
        mask[5] = mask[6, 0] if kind == "float" else False

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"dropout_p": 0.3 if kind == "dropout" else 0.0, "is_causal": kind == "causal"}
        allowed = mask if mask is None or kind == "bool" else mask.to(q.dtype)
        grouped = kind == "grouped"
        return F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=grouped, **options)

    def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-2, -1) * 0.2).masked_fill(later, -torch.inf)
        return F.softmax(scores, dim=-1) @ v

    return {"written": written, "capped": capped, "window": in_a_window}.get(kind, fused), leaves


@pytest.mark.rotates(16)
@pytest.mark.parametrize(
    "kind",
    ["none", "causal", "bool", "float", "grouped", "dropout", "written", "window", "capped"],
)
@pytest.mark.parametrize(
    "tiling",
    [
        AttentionGradientUnitsTiling(LARGE, "f16", 32, 2, 32),
        AttentionGradientUnitsTiling(LARGE, "f16", 64, 3, 16),
        AttentionGradientUnitsTiling(SMALL, "f16", 16, 4, 16),
    ],
    ids=str,
)
def test_training(
    tiling: AttentionGradientUnitsTiling, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, as the kernels without matrix units; else as exact gradients."""
    function, leaves = in_training(kind)

    def run(f: Any, *arguments: Tensor) -> list[Tensor]:
        torch._dynamo.reset()
        plan_cache.clear()
        torch.manual_seed(3)
        arguments = tuple(x.detach().requires_grad_() for x in arguments)
        result = f(*arguments)
        cotangent = torch.linspace(-1, 1, result.numel(), dtype=result.dtype)
        return [result, *torch.autograd.grad(result, arguments, cotangent.view(result.shape))]

    compiled = torch.compile(function, backend="webgpu", fullgraph=True)
    if kind == "dropout":
        wanted = run(compiled, *leaves)
    else:
        wanted = run(function, *(x.double() for x in leaves))
    used = use(TILINGS[0], monkeypatch), use_for_gradients(tiling, monkeypatch)
    for got, expected in zip(run(compiled, *leaves), wanted, strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=4e-3, atol=4e-3)
    assert all(map(any, used))
    assert not counters.fallbacks


def on_a_gpu(config: MatrixConfig) -> Target:
    return replace(
        TARGET,
        features=frozenset({"shader-f16", "subgroup", "chromium-experimental-subgroup-matrix"}),
        subgroup_sizes=(32, 32),
        max_workgroup_invocations=1024,
        max_workgroup_nbytes=48 << 10,
        subgroup_matrix_configs=(config,),
    )


@pytest.mark.rotates(4)
@pytest.mark.parametrize("unit", [SMALL, WIDE, LARGE], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tint_accepts_the_kernels(kind: str, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "f16", "f32", unit.m, unit.n, unit.k
    monkeypatch.setattr(target_module, "MATRIX_KERNELS", {"attention": frozenset({config})})
    monkeypatch.setattr(cost, "waits_for_key_end", lambda *_: True)
    shared = AttentionUnitsTiling(unit, "f16", 32, 2, 2, 32, 1)
    for tiling in (None, shared, replace(shared, scored=2)):
        if tiling is not None:
            monkeypatch.setattr(choice, "attention_units_tiling", lambda *_, t=tiling: t)
        function, arguments = attention_of(kind, SIZES[0])
        compiled = compile_function(function, *arguments, target=on_a_gpu(config))
        (kernel,) = [k.wgsl for k in compiled.plan.kernels if k.kind == "attention"]
        assert "subgroupMatrixMultiplyAccumulate" in kernel
        assert not tint().error(kernel)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("unit", [SMALL, WIDE, LARGE], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_tint_accepts_gradients(causal: bool, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "f16", "f32", unit.m, unit.n, unit.k
    monkeypatch.setattr(target_module, "MATRIX_KERNELS", {"attention": frozenset({config})})
    _, (q, k, v) = attention_of("none", SIZES[0])
    statistics = torch.randn(q.shape[:3]), torch.randn(q.shape[:3])
    arguments = q, q, k, v, torch.randn(q.shape[2], k.shape[2]), *statistics

    def f(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> list[Tensor]:
        return torch.ops.webgpu.attention_backward(grad, q, k, v, *rest, causal, 0.3)  # type: ignore[no-any-return]

    compiled = compile_function(f, *arguments, target=on_a_gpu(config))
    kernels = [k.wgsl for k in compiled.plan.kernels if "subgroupMatrix" in k.wgsl]
    assert len(kernels) == 2
    for kernel in kernels:
        assert not tint().error(kernel)


@pytest.mark.parametrize(
    ("sizes", "dtype", "in_units"),
    [
        ((2, 70, 70, 64, 64), torch.float16, True),
        ((2, 70, 70, 128, 128), torch.float16, True),
        ((2, 70, 70, 64, 64), torch.float32, False),
        ((2, 70, 70, 64, 64), torch.bfloat16, False),
        ((2, 9, 70, 64, 64), torch.float16, False),
        ((2, 70, 70, 256, 256), torch.float16, False),
    ],
    ids=str,
)
def test_what_is_computed_in_units(
    sizes: tuple[int, ...], dtype: torch.dtype, in_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = "f16", "f32", 16, 16, 16
    monkeypatch.setattr(target_module, "MATRIX_KERNELS", {"attention": frozenset({config})})
    function, arguments = attention_of("none", sizes)
    target = on_a_gpu(config)
    compiled = compile_function(function, *(x.to(dtype) for x in arguments), target=target)
    assert any("subgroupMatrix" in k.wgsl for k in compiled.plan.kernels) == in_units


def test_the_largest_tilings_have_enough_workgroups() -> None:
    config = "f16", "f32", 16, 16, 16
    target = on_a_gpu(config)

    def queries(heads: int, length: int, head: int) -> int:
        sizes = head, head
        found = choose_attention_units_tiling(
            as_expr(heads), as_expr(length), sizes, config, target
        )
        assert found is not None
        assert attention_units_fit(found, sizes, target)
        return found.queries

    assert queries(128, 1024, 64) > queries(12, 512, 64) >= queries(2, 40, 64)
