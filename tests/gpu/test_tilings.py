"""Matmul and attention kernels in every kind of tiling, and the choice by measurement."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.providers import device_in_use
from tests.rotation import picked
from torch_webgpu_compile import codegen
from torch_webgpu_compile.codegen.kernels import attention_kernel
from torch_webgpu_compile.codegen.tilings import choose as choice
from torch_webgpu_compile.codegen.tilings import contraction
from torch_webgpu_compile.codegen.tilings.attention_tilings import AttentionTiling
from torch_webgpu_compile.codegen.tilings.matmul import MatmulTiling, fits
from torch_webgpu_compile.codegen.tilings.units import Unit, UnitsTiling
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.target import Target
from torch_webgpu_compile.tuning import autotune

pytestmark = pytest.mark.rotates(16)

MATMULS = [
    MatmulTiling(64, 64, 8, 8, 8, True, 8, slices=4),
    MatmulTiling(64, 64, 16, 8, 8, False, 8, slices=4),
    MatmulTiling(32, 32, 8, 8, 8, True, 8, slices=8),
    MatmulTiling(64, 32, 8, 8, 4, True, 8, slices=2),
    MatmulTiling(4, 32, 8, 4, 4, False, 8, slices=16),
    MatmulTiling(128, 64, 8, 8, 8, True, 8),
    MatmulTiling(72, 96, 8, 8, 8, True, 8, slices=2),
    MatmulTiling(48, 80, 8, 8, 4, True, 8),
    MatmulTiling(96, 64, 8, 12, 8, True, 8, slices=2),
    MatmulTiling(40, 48, 8, 4, 8, False, 8, slices=4),
    MatmulTiling(64, 64, 8, 8, 8, True, 8, slices=2, strips=1),
    MatmulTiling(64, 128, 8, 8, 8, True, 8, strips=2),
    MatmulTiling(32, 32, 16, 8, 8, False, 8, slices=2, strips=1),
    MatmulTiling(48, 64, 8, 8, 8, True, 8, slices=2, strips=1),
    MatmulTiling(32, 96, 8, 8, 8, True, 8, slices=2, strips=1),
]
ATTENTIONS = [
    AttentionTiling(32, 64),
    AttentionTiling(32, 32, 8),
    AttentionTiling(32, 32, 4, 8),
    AttentionTiling(32, 32, 8, 8),
    AttentionTiling(16, 16, 8, slices=2),
    AttentionTiling(16, 16, 4, 8, slices=4),
    AttentionTiling(4, 8, slices=8),
    AttentionTiling(4, 4),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def forget_plans():
    """Plans are remembered by what they compute, not by a patched choice."""
    plan_cache.clear()
    yield
    plan_cache.clear()


# Rows, inner, columns; whether the second matrix is transposed. Unrolled kernels compile slowly.
PRODUCTS = [
    (sizes, transposed)
    for sizes in ((64, 64, 64), (70, 33, 50), (3, 300, 129), (100, 7, 30))
    for transposed in (False, True)
]


@pytest.mark.parametrize("tiling", MATMULS, ids=str)
def test_matmul(tiling, monkeypatch, forget_plans, every_case):
    target = device_in_use().target
    if tiling.workgroup > target.max_workgroup_invocations:
        pytest.skip("the adapter's workgroups are smaller")
    own = contraction.choose_matmul_tiling

    def choose(problem, target):  # loads element by element may need more than there is
        allowed = fits(tiling, problem.itemsize, problem.axes, target)
        return tiling if allowed else own(problem, target)

    monkeypatch.setattr(contraction, "choose_matmul_tiling", choose)
    chosen = {picked(f"{tiling} {part}", PRODUCTS[part::2]) for part in range(2)}
    for (rows, inner, columns), transposed in PRODUCTS if every_case else sorted(chosen):
        x, bias = torch.randn(rows, inner), torch.randn(columns)
        w = torch.randn(columns, inner).t() if transposed else torch.randn(inner, columns)
        torch._dynamo.reset()

        def f(x, w, bias):
            return torch.relu(x @ w + bias)

        got = torch.compile(f, backend="webgpu", dynamic=False)(x, w, bias)
        torch.testing.assert_close(got, f(x, w, bias), rtol=1e-4, atol=1e-4)


KINDS = ["none", "causal", "bool", "lowest", "float", "no key"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiling", ATTENTIONS, ids=str)
def test_attention(tiling, kind, monkeypatch, forget_plans):
    _check_attention(tiling, kind, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiling", ATTENTIONS[1:5], ids=str)
def test_attention_with_shuffles(tiling, kind, monkeypatch, forget_plans):
    """Lavapipe promises no subgroup size, but has that of its vectors."""
    target = device_in_use().target
    size = target.subgroup_size or (8 if "256 bits" in target.name else 0)
    if not size:
        pytest.skip("the adapter's subgroup size is not known")
    known = replace(target, subgroup_sizes=(size, size))
    if attention_kernel.attention_subgroup(tiling, known) != size:
        pytest.skip("the workgroup is not a whole number of subgroups")
    monkeypatch.setattr(attention_kernel, "attention_subgroup", lambda *_: size)
    _check_attention(tiling, kind, monkeypatch)


def _check_attention(tiling, kind, monkeypatch):
    target = device_in_use().target
    subgroup = attention_kernel.attention_subgroup(tiling, target)
    if tiling.workgroup_nbytes(32, 32, subgroup) > target.max_workgroup_nbytes:
        pytest.skip("the adapter's workgroups have less memory")
    monkeypatch.setattr(choice, "choose_attention_tiling", lambda *_: tiling)
    monkeypatch.setattr(Target, "prefers_less_code", False)  # as on GPUs
    for heads, queries, keys, head, value_head in ((2, 70, 70, 32, 32), (1, 33, 100, 12, 20)):
        q, k = torch.randn(1, heads, queries, head), torch.randn(1, heads, keys, head)
        v = torch.randn(1, heads, keys, value_head)
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()
        lowest = torch.finfo(torch.float32).min
        mask = {
            "bool": causal,
            "lowest": torch.where(causal, 0.0, lowest).index_fill(0, torch.tensor([3]), lowest),
            "float": torch.randn(queries, keys),
            "no key": causal & (torch.arange(queries) != 5).unsqueeze(1),
        }.get(kind)
        torch._dynamo.reset()

        def f(q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal")

        with torch.no_grad():
            got = torch.compile(f, backend="webgpu", dynamic=False)(q, k, v, mask)
            torch.testing.assert_close(got, f(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_tilings_for_matrix_units_are_measured(monkeypatch):
    """And the fastest one is used: `max-autotune` with the kernel of invocations in their place."""
    unit = Unit(16, 16, 16)
    chosen, slow, fast = (
        UnitsTiling(unit, "f16", 32, size, size, inner, 2, 1)
        for size, inner in ((64, 32), (64, 16), (32, 16))
    )
    for module in (contraction, autotune):
        monkeypatch.setattr(module, "units_tiling", lambda *_: chosen)
    monkeypatch.setattr(autotune, "units_candidates", lambda *_: [chosen, slow, fast])
    monkeypatch.setattr(autotune, "_measured", {})
    monkeypatch.setenv("TORCH_WEBGPU_CACHE", "0")
    generated = []
    original = autotune.generate_contraction

    def generate(*arguments):
        generated.append(arguments[-1])
        return original(*arguments)

    for module in (autotune, codegen):
        monkeypatch.setattr(module, "generate_contraction", generate)
    times = iter([3e-6, 2e-6, 1e-6])
    monkeypatch.setattr(autotune, "seconds_of", lambda *_: next(times))
    x, w = torch.randn(48, 72).half(), torch.randn(72, 40).half()
    function = torch.compile(torch.mm, backend="webgpu", mode="max-autotune")
    torch.testing.assert_close(function(x, w), x @ w, rtol=4e-3, atol=4e-2)
    assert generated == [chosen, slow, fast, fast]


def test_measured_tilings_are_kept(tmp_path, monkeypatch):
    x, w = torch.randn(48, 72), torch.randn(72, 40)
    measured = []
    original = autotune.seconds_of

    def seconds_of(*arguments):
        measured.append(original(*arguments))
        return measured[-1]

    monkeypatch.setattr(autotune, "seconds_of", seconds_of)
    candidates = [MatmulTiling(32, 32, 16, 4, 4, True, 8), MATMULS[2]]
    monkeypatch.setattr(autotune, "matmul_candidates", lambda *_: candidates)

    def run(mode):
        torch._dynamo.reset()
        options = {"cache": str(tmp_path)}
        if mode is None:
            function = torch.compile(lambda x: x @ w, backend="webgpu", options=options)
        else:
            monkeypatch.setenv("TORCH_WEBGPU_CACHE", str(tmp_path))
            function = torch.compile(lambda x: x @ w, backend="webgpu", mode=mode)
        torch.testing.assert_close(function(x), x @ w, rtol=1e-4, atol=1e-4)

    run("max-autotune")
    assert len(measured) == 2
    assert all(seconds > 0 for seconds in measured)
    (path,) = (tmp_path / "tunings").iterdir()
    fields = json.loads(path.read_text().partition("\n")[2])["32-bit 1x48x40x72 inner outer"]
    assert MatmulTiling(**fields) == candidates[measured.index(min(measured))]

    autotune._measured.clear()  # as in a new process
    run("max-autotune")
    run(None)
    assert len(measured) == 2
    path.write_text("not a table")
    autotune._measured.clear()
    for plan in tmp_path.glob("*.plan"):
        plan.unlink()
    plan_cache.clear()
    run("max-autotune")
    assert len(measured) == 4
