"""Which tiling attention gets, without an adapter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from torch_webgpu_compile.codegen.tilings.attention_tilings import (
    AttentionTiling,
    choose_attention_tiling,
)
from torch_webgpu_compile.codegen.wgsl.render import environment_of
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
    [(4 * 12, 128, 32), (12, 512, 32), (12, 1024, 64), (8 * 12, 197, 64), (2, 20, 32)],
)
def test_few_tiles_are_smaller_ones(heads, queries, tile):
    tiling = choose_attention_tiling(as_expr(heads), as_expr(queries), 64, 64, GPU)
    assert tiling is not None
    assert tiling.queries == tile


def test_sizes_that_a_call_decides_count_as_large():
    tiling = choose_attention_tiling(symbol("s0", 2), symbol("s1", 2), 64, 64, GPU)
    assert tiling is not None
    assert tiling.queries == 64


def test_a_cpu_has_no_slices():
    one, target = as_expr(1), replace(GPU, software=True)
    assert choose_attention_tiling(as_expr(12), one, 64, 64, GPU).slices > 1
    assert choose_attention_tiling(as_expr(12), one, 64, 64, target).slices == 1


@pytest.mark.parametrize(
    ("tiling", "subgroup"),
    [
        (AttentionTiling(64, 64), 32),
        (AttentionTiling(64, 64, thread_rows=8), 32),
        (AttentionTiling(32, 64), 32),
        (AttentionTiling(32, 64), 16),
        (AttentionTiling(32, 32, 8, 8), 8),
        (AttentionTiling(16, 16, 8, slices=2), 32),
        (AttentionTiling(4, 32, slices=8), 32),
    ],
    ids=str,
)
def test_shuffles_reach_the_invocations_of_a_query(tiling, subgroup):
    """Also where the adapter of the tests has smaller subgroups: the template's text, in Python."""
    macros = environment_of(Target()).get_template("attention_tiles.wgsl.jinja").module
    lines = macros.places("x", "y", tiling.sharing, tiling.block(subgroup))
    text = re.sub(r"(\d)u", r"\1", lines.replace("let ", "").replace("/", "//").replace(";", ""))
    places = {}
    for local in range(tiling.slice_workgroup):
        found = {"local": local}
        exec("\n".join(line.strip() for line in text.splitlines()), {}, found)
        places[found["x"], found["y"]] = local
    rows = tiling.queries // tiling.thread_rows
    assert places.keys() == {(x, y) for x in range(tiling.sharing) for y in range(rows)}
    for y in range(rows):
        first = places[0, y]
        reached = {first}
        for bit in tiling.shuffles(subgroup):
            reached |= {local ^ bit for local in reached}
        assert reached == {places[x, y] for x in range(tiling.sharing)}
        assert len({local // subgroup for local in reached}) == 1
