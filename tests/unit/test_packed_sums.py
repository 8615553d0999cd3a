"""Which sums are products with packed weights, and how kernels compute them, without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compilations import compile_function
from torch_webgpu_compile.ir.graph import RowGroup
from torch_webgpu_compile.ir.packed_levels import CHUNK, quads_of, spacing
from torch_webgpu_compile.ir.packed_rows import PLANES
from torch_webgpu_compile.ir.packed_sums import PackedSums, packed_sums
from torch_webgpu_compile.ir.rows import choose_row_strategy
from torch_webgpu_compile.target import Target
from torch_webgpu_compile.torch_ops import gguf, int4

PLAIN = Target()
WIDE = replace(
    PLAIN,
    features=PLAIN.features | {"subgroup"},
    subgroup_sizes=(32, 32),
    max_workgroup_nbytes=48 << 10,
    max_storage_buffers=16,
    max_workgroup_invocations=1024,
)
ROWS, COLUMNS = 512, 1024


def found_in(function: Callable[..., Tensor], *arguments: Tensor) -> PackedSums | None:
    state = compile_function(function, *arguments)
    (group,) = state.schedule.groups
    assert isinstance(group, RowGroup)
    return packed_sums(group, state.schedule.graph.buffers)


def of_gguf(name: str) -> tuple[Callable[..., Tensor], Tensor]:
    form = gguf.FORMATS[name]
    words = torch.zeros(ROWS, sum(form.words(COLUMNS)), dtype=torch.int32)
    return lambda x, w: torch.ops.webgpu.gguf_linear(x, w, form.number), words


def int4_parts(group: int = 32, rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, ...]:
    packed = torch.zeros(rows, columns // 2, dtype=torch.int8)
    return packed, *torch.rand(2, columns // group, rows).bfloat16()


def row(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, COLUMNS).to(dtype)


# name: bits of each part of a level, elements that share a scale, whether there is an offset
FORMATS = {
    "Q2_K": ((2,), 16, True),
    "Q3_K": ((2, 1), 16, False),
    "Q4_0": ((4,), 32, False),
    "Q4_1": ((4,), 32, True),
    "Q4_K": ((4,), 32, True),
    "Q5_0": ((4, 1), 32, False),
    "Q5_K": ((4, 1), 32, True),
    "Q6_K": ((4, 2), 16, False),
    "Q8_0": ((8,), 32, False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    bits, group, has_offset = FORMATS[name]
    function, words = of_gguf(name)
    found = found_in(function, row(), words)
    assert found is not None
    (own,) = found.sums
    assert tuple(part.width for part in own.levels.parts) == bits
    assert own.group == group
    assert (own.offset is not None) == has_offset
    assert own.zero == gguf.FORMATS[name].zero
    for part in own.levels.parts:
        assert all(spacing(part, quad) for quad in quads_of(own.levels.order))
    assert sorted(e for quad in quads_of(own.levels.order) for e in quad) == [*range(CHUNK)]


def test_places_of_int4() -> None:
    found = found_in(torch.ops.webgpu.int4_linear, row(), *int4_parts())
    assert found is not None
    (own,) = found.sums
    (part,) = own.levels.parts
    assert own.levels.signed
    assert part.places == tuple(range(0, 4 * CHUNK, 4))
    assert part.words == 4
    assert own.levels.order == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_bytes_need_no_scale() -> None:
    packed, scale = torch.zeros(ROWS, COLUMNS, dtype=torch.int8), torch.rand(ROWS)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = found_in(torch.ops.aten._weight_int8pack_mm, row(dtype), packed, scale.to(dtype))
        assert found is not None
        assert found.sums[0].scale is None
        assert found.order == ((0, 1, 2, 3), (4, 5, 6, 7))


def big_endian(x: Tensor, words: Tensor, scale: Tensor) -> Tensor:
    """Levels of which a word has the first in its highest bits."""
    shifts = torch.arange(28, -4, -4, dtype=torch.int32)
    levels = ((words[..., None] >> shifts) & 15).flatten(1)
    return x @ (levels.float() * scale).t()


def test_any_order_in_a_word() -> None:
    words = torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32)
    found = found_in(big_endian, torch.randn(1, COLUMNS), words, torch.rand(ROWS, 1))
    assert found is None  # bytes of the factor would be in the opposite order


def of_wide_levels(x: Tensor, words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 16, dtype=torch.int32)
    return x @ ((words[..., None] >> shifts) & 0xFFFF).flatten(1).float().t()


def with_scale_of_eight(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    return x @ (packed.float().view(ROWS, -1, 8) * scale[..., None]).flatten(1).t()


def squared(x: Tensor, packed: Tensor) -> Tensor:
    return x @ packed.float().square().t()


def largest(x: Tensor, packed: Tensor) -> Tensor:
    return (x * packed.float()).amax(1)


# name: (function, arguments) of what is computed as it was
OTHERS = {
    "several rows": (
        torch.ops.webgpu.int4_linear,
        (torch.randn(2, COLUMNS), *int4_parts()),
    ),
    "a weight rounded to float16": (
        torch.ops.webgpu.int4_linear,
        (row(torch.float16), *int4_parts()),
    ),
    "a table": (of_gguf("IQ4_NL")[0], (row(), of_gguf("IQ4_NL")[1])),
    "no integers": (F.linear, (torch.randn(1, COLUMNS), torch.randn(ROWS, COLUMNS))),
    "sixteen bits": (
        of_wide_levels,
        (torch.randn(1, COLUMNS), torch.zeros(ROWS, COLUMNS // 2, dtype=torch.int32)),
    ),
    "a scale of eight": (
        with_scale_of_eight,
        (
            torch.randn(1, COLUMNS),
            torch.zeros(ROWS, COLUMNS, dtype=torch.int8),
            torch.rand(ROWS, COLUMNS // 8),
        ),
    ),
    "squares": (squared, (torch.randn(1, COLUMNS), torch.zeros(ROWS, COLUMNS, dtype=torch.int8))),
    "maxima": (largest, (torch.randn(1, COLUMNS), torch.zeros(ROWS, COLUMNS, dtype=torch.int8))),
    "a row that chunks do not divide": (
        lambda x, w: x @ w.float().t(),
        (torch.randn(1, 1000), torch.zeros(ROWS, 1000, dtype=torch.int8)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    function, arguments = OTHERS[name]
    kernels = [call.kernel.wgsl for call in compile_function(function, *arguments).calls]
    assert not any("dot4I8Packed" in kernel for kernel in kernels)


def gated(x: Tensor, norm: Tensor, *parts: Tensor) -> Tensor:
    h = norm * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    gate, up = (int4.of_parts(h, *own) for own in (parts[:3], parts[3:]))
    return F.silu(gate) * up


@pytest.mark.parametrize("target", [PLAIN, WIDE], ids=["plain", "wide"])
def test_statistics_are_floats_beside_them(target: Target) -> None:
    target = replace(target, max_storage_buffers=16)
    parts = (*int4_parts(), *int4_parts())
    state = compile_function(
        gated, torch.randn(1, COLUMNS), torch.rand(COLUMNS), *parts, target=target
    )
    (group,) = state.schedule.groups
    assert isinstance(group, RowGroup)
    found = packed_sums(group, state.schedule.graph.buffers)
    assert found is not None
    assert (len(found.sums), len(found.statistics)) == (2, 1)
    (call,) = state.calls
    # Eight words of four levels, for each plane and each of both weights.
    assert call.kernel.wgsl.count("dot4I8Packed(") == 8 * PLANES * 2
    assert call.kernel.workgroup_nbytes <= 16 << 10


def strategy_of(rows: int, columns: int, target: Target = WIDE, group: int = 32):
    x, parts = torch.randn(1, columns).bfloat16(), int4_parts(group, rows, columns)
    state = compile_function(torch.ops.webgpu.int4_linear, x, *parts, target=target)
    (rows_of,) = (g for g in state.schedule.groups if isinstance(g, RowGroup))
    return choose_row_strategy(rows_of, state.schedule.graph.buffers, target)


def test_invocations_take_several_of_many_rows() -> None:
    """Of 132 multiprocessors each gets two workgroups, if there are rows enough."""
    target = replace(WIDE, machine=replace(WIDE.machine, multiprocessors=132))
    sizes = [(512, 2048), (2048, 2048), (2048, 8192), (8190, 2048), (8192, 2048)]
    strategies = [strategy_of(*size, target) for size in sizes]
    chosen = [(s.packed.rows_each, s.packed.lanes) for s in strategies if s.packed]
    assert chosen == [(1, 64), (2, 64), (4, 128), (2, 32), (4, 32)]


def test_few_rows_are_computed_as_they_were() -> None:
    assert strategy_of(255, 2048).packed is None


@pytest.mark.parametrize("target", [PLAIN, WIDE], ids=["plain", "wide"])
@pytest.mark.parametrize("columns", [128, 512, 2048, 4096, 8192, 8224, 11008, 28672])
def test_blocks_fit_into_workgroup_memory(columns: int, target: Target) -> None:
    strategy = strategy_of(512, columns, target)
    packed = strategy.packed
    assert packed is not None
    chunks = columns // CHUNK
    assert packed.lanes == min(128, 1 << (chunks.bit_length() - 1))
    nbytes = sum(array.nbytes for array in strategy.arrays(strategy.tiling.workgroup))
    assert nbytes <= min(32 << 10, target.max_workgroup_nbytes)
    blocks = -(-chunks // packed.block)
    assert packed.block - -(-chunks // blocks) < packed.lanes
