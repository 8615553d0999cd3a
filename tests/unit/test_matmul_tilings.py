"""Which tilings products get, without an adapter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import compile_function
from torch_webgpu_compile.bundle.targets import BROWSER
from torch_webgpu_compile.codegen.tilings.matmul import MatmulProblem, choose_matmul_tiling
from torch_webgpu_compile.codegen.tilings.units import units_tilings
from torch_webgpu_compile.symbolic.size_classes import size_class
from torch_webgpu_compile.symbolic.sizes import as_expr, symbol, typical
from torch_webgpu_compile.target import Target

GPU = Target(max_workgroup_invocations=1024, max_workgroup_nbytes=49152)
CONFIG = ("f16", "f32", 16, 16, 16)
UNITS = replace(
    GPU,
    features=GPU.features | {"subgroup", "chromium-experimental-subgroup-matrix"},
    subgroup_sizes=(32, 32),
    subgroup_matrix_configs=(CONFIG,),
)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "tile"),
    [
        (1, 50257, 768, (128, 128)),
        (4, 1024, 768, (128, 64)),
        (1, 1 << 20, 64, (128, 64)),
        (None, 512, 512, (128, 64)),
        (1, 768, 3072, (64, 64)),
    ],
    ids=["many tiles", "few", "half empty ones", "an unknown number", "fewer"],
)
def test_the_largest_tiles_are_for_the_largest_results(batch, rows, columns, tile):
    problem = MatmulProblem(batch, ((rows, columns),), 1024, 4, "rows", "columns")
    tiling = choose_matmul_tiling(problem, GPU)
    assert (tiling.rows, tiling.columns) == tile


def test_tiles_are_full():
    """Of 64 rows, half of a larger tile would be empty."""
    assert choose_matmul_tiling(problem_of(16, 64, 3136), GPU).rows == 64
    assert choose_matmul_tiling(problem_of(16, 96, 3136), GPU).rows == 128


@pytest.mark.parametrize(("columns", "tile"), [(12544, 64), (784, 64)])
def test_tiles_are_full_of_the_smaller_sizes_of_a_class(columns, tile):
    """64 rows are of one class with 128."""
    rows = 4 * symbol("rows", 12, 47)
    images = 4 * symbol("images", 3, 11)
    sizes = images, 4 * symbol("inner", 48, 191)
    shapes = [(rows, as_expr(columns))]
    problem = MatmulProblem.of(sizes, shapes, 4, ("inner", "scalar_inner"), paired=False)
    assert choose_matmul_tiling(problem, GPU).rows == tile


def test_tiles_of_windows_are_tall():
    """Each tile of rows loads all windows, element by element."""
    windows = problem_of(16, 128, 784, rhs="scalar_inner")
    assert choose_matmul_tiling(windows, GPU).rows == 128
    assert choose_matmul_tiling(problem_of(16, 128, 784), GPU).rows == 64


@pytest.mark.parametrize(
    ("rows", "columns", "registers"),
    [(1024, 1024, 64), (120, 1536, 32), (120, 384, 16), (9, 99, 16)],
)
def test_a_page_waits_for_short_kernels(rows, columns, registers):
    tiling = choose_matmul_tiling(problem_of(1, rows, columns), BROWSER)
    assert tiling.thread_rows * tiling.thread_columns == registers
    assert not tiling.double_buffer
    assert tiling.slices == 1


def test_sizes_that_a_call_decides_have_the_tiles_of_the_larger_ones():
    """Where their class has room for it: small tiles take half as long again."""
    known = size_class(2048)
    size = typical(known.unit * symbol("s", known.lower, known.most))
    for rows, tile in ((2048, 128), (size, 128), (512, 64)):
        problem = MatmulProblem(1, ((rows, rows),), rows, 4, "inner", "outer", factor="f16")
        assert next(units_tilings(problem, "f16", CONFIG, UNITS)).rows == tile


def test_shifts_of_columns_in_parts_have_one_kernel_to_join_them():
    """The largest and the smallest exponents of all parts, whose kernel is one, too."""
    factors = [torch.zeros(2048, 2048, dtype=torch.bfloat16) for _ in range(2)]
    calls = compile_function(torch.mm, *factors, target=UNITS).calls
    assert len([c for c in calls if c.kernel.name.startswith("reduction")]) == 1


def problem_of(batch, rows, columns, rhs="outer"):
    return MatmulProblem(batch, ((rows, columns),), 1152, 4, "inner", rhs)
