"""What decisions take from a `Machine`: an H200's numbers unless others are given."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from tests.compilations import OPTIONS, TARGET, compile_function
from torch_webgpu_compile.codegen.tilings.attention_tilings import choose_attention_tiling
from torch_webgpu_compile.compiler import cache_key
from torch_webgpu_compile.ir.rows import choose_row_tiling
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan.cache_folder import CacheFolder
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.symbolic.sizes import as_expr
from torch_webgpu_compile.target import Machine, Target
from torch_webgpu_compile.tuning import machines

SMALL = Target(
    machine=Machine(
        bytes_per_second=100e9,
        flops_per_second=3e12,
        dispatch_seconds=5e-6,
        multiprocessors=8,
    )
)


def test_an_h200() -> None:
    """The numbers that decisions were measured with, before rates and counts of a GPU gave them."""
    machine = Machine()
    assert machine.dispatch_nbytes == 1 << 23
    assert machine.dispatch_operations == 1 << 20
    assert cost.node_nbytes(100, 80, TARGET) == (1 << 23) + 100 + 80 / 8
    assert cost.scalar_operand_nbytes(80, TARGET) == 10
    assert [cost.weight_copy_pays(n, TARGET) for n in (127, 128)] == [False, True]
    assert [cost.is_cheap(n, 2, TARGET) for n in (12, 13)] == [True, False]
    assert [cost.is_cheap_in_tiles(n, 2, TARGET) for n in (4, 5)] == [True, False]
    assert [cost.is_small_kernel(n, TARGET) for n in (32 << 20, (32 << 20) + 1)] == [True, False]
    assert [cost.is_small_map(n, TARGET) for n in (4096, 4097)] == [True, False]
    full = 260 * 64 * 128
    assert [cost.fills_with_a_product(n, TARGET) for n in (full - 1, full)] == [False, True]
    assert [cost.may_be_kept(n, 1200, TARGET) for n in (100, 101)] == [True, False]
    assert cost.filling_workgroups(TARGET) == 384
    assert cost.attention_parts(12, 1, 1 << 16, TARGET) == 64
    assert cost.attention_parts(256, 1, 1 << 16, TARGET) == 16
    assert cost.row_parts(1, 1 << 20, TARGET) == 64
    assert cost.column_parts(64, 1 << 20, TARGET) == 4096


def test_a_smaller_gpu_is_full_sooner() -> None:
    assert cost.filling_workgroups(SMALL) == 24
    assert cost.attention_parts(12, 1, 1 << 16, SMALL) == 21
    assert cost.column_parts(64, 1 << 20, SMALL) < cost.column_parts(64, 1 << 20, TARGET)
    assert _best_inner_parts(96, (1, 512, 768, 3072), TARGET) == 4
    assert _best_inner_parts(96, (1, 512, 768, 3072), SMALL) == 1
    sizes = as_expr(48), as_expr(128), 64, 64
    large = replace(TARGET, max_workgroup_invocations=1024, max_workgroup_nbytes=48 << 10)
    few = choose_attention_tiling(*sizes, large)
    many = choose_attention_tiling(*sizes, replace(large, machine=SMALL.machine))
    assert few is not None
    assert many is not None
    assert few.queries < many.queries


def _best_inner_parts(workgroups: int, sizes: tuple[int, int, int, int], target: Target) -> int:
    def nbytes(parts: int) -> float:
        return cost.parts_nbytes(sizes, parts, workgroups, target, joined=True, masked=False)

    return min(cost.inner_part_counts(*sizes[1:], target), key=nbytes)


def test_parts_fill_a_gpu_and_are_few_where_it_is_full() -> None:
    """144 workgroups are two turns on 132 multiprocessors; so are those of GPT-2's vocabulary."""
    assert _best_inner_parts(144, (1, 768, 768, 1024), TARGET) == 4
    assert _best_inner_parts(192, (1, 1024, 768, 3072), TARGET) == 2
    assert _best_inner_parts(192, (1, 1024, 768, 50257), TARGET) == 4
    assert _best_inner_parts(12, (1, 96, 384, 25088), TARGET) > 16
    assert _best_inner_parts(4, (1, 64, 256, 50176), TARGET) > 32
    assert _best_inner_parts(12 * 64, (1, 3072, 1024, 768), TARGET) == 1


def test_slower_memory_makes_arithmetic_cheap() -> None:
    operations = 10
    assert not cost.is_cheap(operations, 1, TARGET)
    assert cost.is_cheap(operations, 1, SMALL)


def test_wide_workgroups_of_a_machine() -> None:
    narrow = replace(TARGET, machine=Machine(workgroup_invocations=64))
    assert narrow.workgroup_invocations == 64
    assert replace(TARGET, max_workgroup_invocations=32).workgroup_invocations == 32
    assert choose_row_tiling(as_expr(99), as_expr(128), True, narrow, True).workgroup == 64
    x = torch.randn(1000)
    (kernel,) = compile_function(lambda x: x.sin() + 1, x, target=narrow).plan.kernels
    assert "@workgroup_size(64)" in kernel.wgsl


@pytest.mark.parametrize("name", [field.name for field in fields(Machine)])
def test_the_cache_key_covers_every_number(name: str) -> None:
    graph = compile_function(torch.sin, torch.randn(4)).graph
    other = replace(TARGET, machine=replace(Machine(), **{name: 7}))
    keys = {cache_key(graph, target, OPTIONS) for target in (TARGET, other)}
    assert len(keys) == 2


def test_another_machine_gives_another_plan() -> None:
    x, w = torch.randn(512, 3072), torch.randn(3072, 768)
    counts = [
        compile_function(torch.mm, x, w, target=target).plan.dispatch_count
        for target in (TARGET, SMALL)
    ]
    assert counts == [2, 1]


def test_what_was_measured_is_used_where_the_cache_is_on(tmp_path: Path) -> None:
    cached = replace(OPTIONS, cache=str(tmp_path))
    gpu = Target(name="A GPU", backend="Metal")
    assert machines.measured_target(gpu, cached) is gpu
    machines.store(gpu, SMALL.machine, str(tmp_path))
    machines._known.clear()  # as in a new process
    x, w = torch.randn(512, 3072), torch.randn(3072, 768)

    def dispatches(target: Target, options: CompileOptions) -> int:
        return compile_function(torch.mm, x, w, target=target, options=options).plan.dispatch_count

    assert machines.measured_target(gpu, cached).machine == SMALL.machine
    assert dispatches(gpu, cached) == 1
    assert dispatches(gpu, OPTIONS) == 2
    assert dispatches(gpu, replace(cached, deterministic=True)) == 2
    assert dispatches(replace(gpu, name="Another GPU"), cached) == 2
    given = replace(gpu, machine=Machine(multiprocessors=264))
    assert machines.measured_target(given, cached) is given


@pytest.mark.parametrize(
    "change",
    [
        {"multiprocessors": 0},
        {"multiprocessors": 1.5},
        {"dispatch_seconds": float("nan")},
        {"bytes_per_second": "fast"},
        {"multiprocessors": True},
        {"another": 1},
    ],
)
def test_stored_numbers_that_are_none_are_not_used(
    tmp_path: Path, change: dict[str, object]
) -> None:
    stored = asdict(SMALL.machine)
    folder = CacheFolder(tmp_path / "machines")
    for content, wanted in ((stored, SMALL.machine), (stored | change, None)):
        machines._known.clear()
        folder.write(TARGET.file_name, TARGET.identity, json.dumps(content).encode())
        assert machines.measured(TARGET, str(tmp_path)) == wanted
