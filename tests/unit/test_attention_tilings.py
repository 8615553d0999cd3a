"""Which tiling attention gets, without an adapter."""

from __future__ import annotations

import pytest

from torch_webgpu_compile.codegen.tilings.attention import choose_attention_tiling
from torch_webgpu_compile.symbolic.sizes import as_expr, symbol
from torch_webgpu_compile.target import Target

GPU = Target(
    features=frozenset({"subgroup"}),
    subgroup_sizes=(32, 32),
    max_workgroup_invocations=1024,
    max_workgroup_nbytes=49152,
)


@pytest.mark.parametrize(
    ("heads", "queries", "tile"),
    [(8 * 12, 128, 32), (12, 512, 32), (8 * 12, 197, 64), (8 * 16, 1024, 64), (2, 20, 32)],
)
def test_few_tiles_are_smaller_ones(heads, queries, tile):
    tiling = choose_attention_tiling(as_expr(heads), as_expr(queries), 64, 64, GPU)
    assert tiling is not None
    assert tiling.queries == tile


def test_sizes_that_a_call_decides_count_as_large():
    tiling = choose_attention_tiling(symbol("s0", 2), symbol("s1", 2), 64, 64, GPU)
    assert tiling is not None
    assert tiling.queries == 64
