"""Which tilings attention's gradients get, on adapters of every size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import compile_function
from torch_webgpu_compile.codegen.tilings.attention_tilings import (
    _GRADIENT_TILINGS,
    choose_attention_gradient_tiling,
)
from torch_webgpu_compile.symbolic.sizes import as_expr, symbol
from torch_webgpu_compile.target import Target

SMALL = Target()
LARGE = replace(SMALL, max_workgroup_nbytes=48 << 10, max_workgroup_invocations=1024)


def choose(rows, batch, size, target):
    width = -(-size // 4)
    found = choose_attention_gradient_tiling(rows, batch, width, width, target)
    assert found is not None
    return found


def test_large_adapters_take_large_tiles():
    many = as_expr(4096)
    assert choose(as_expr(1024), many, 64, LARGE) == _GRADIENT_TILINGS[0]
    assert choose(symbol("s0", 2), symbol("s1", 2), 64, LARGE) == _GRADIENT_TILINGS[0]
    assert choose(as_expr(1024), many, 128, LARGE).direct
    assert choose(as_expr(1024), many, 64, SMALL).direct
    assert choose(as_expr(1024), many, 128, SMALL).owned == 8


def test_few_rows_take_small_tiles():
    assert choose(as_expr(20), as_expr(4096), 64, LARGE).owned == 32
    assert choose(as_expr(3), as_expr(4096), 64, LARGE).owned == 4


def test_few_workgroups_become_more():
    """12 heads of 512 keys are 96 workgroups of 64 keys."""
    assert choose(as_expr(512), as_expr(12), 64, LARGE).owned == 32
    assert choose(as_expr(1024), as_expr(12), 64, LARGE).owned == 64


@pytest.mark.parametrize("target", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("size", [1, 4, 7, 40, 64, 80, 128, 200, 256])
def test_every_head_size_fits(size, target):
    tiling = choose(as_expr(1024), as_expr(4096), size, target)
    width = -(-size // 4)
    assert tiling.workgroup_nbytes(width, width) <= target.max_workgroup_nbytes


@pytest.mark.parametrize("tiling", _GRADIENT_TILINGS, ids=str)
def test_tilings_are_whole(tiling):
    """Every invocation has a place in both divisions of the work."""
    assert tiling.scoring <= tiling.workgroup
    assert tiling.scoring * 4 * tiling.thread_walked == tiling.owned * tiling.walked
    assert tiling.columns * tiling.owned == 4 * tiling.workgroup
    assert tiling.owned % 4 == tiling.walked % 4 == 0


def test_heads_beyond_workgroup_memory_have_no_tiling():
    tiny = replace(SMALL, max_workgroup_nbytes=1024)
    assert choose_attention_gradient_tiling(as_expr(9), as_expr(1), 64, 64, tiny) is None


@pytest.mark.parametrize("size", [64, 256])
def test_kernels_keep_the_limits_of_every_adapter(size):
    """8 storage buffers, 16 KiB and 256 invocations, with a bias and dropout."""
    q = torch.randn(1, 2, 12, size)
    bias, seed = torch.randn(12, 12), torch.tensor([3, 5], dtype=torch.int32)
    statistic = torch.randn(1, 2, 12)

    def run(q, bias, seed, lse, delta):
        operator = torch.ops.webgpu.attention_backward
        return operator(q, q + 1, q + 2, q + 3, bias, lse, delta, True, 0.1, seed, 0.1)

    state = compile_function(run, q, bias, seed, statistic, statistic + 1)
    kernels = [k for k in state.plan.kernels if k.kind == "attention"]
    assert len(kernels) == 2
    for kernel in kernels:
        assert len(kernel.bindings) <= SMALL.max_storage_buffers
        assert kernel.workgroup_nbytes <= SMALL.max_workgroup_nbytes
        assert kernel.workgroup_size[0] <= SMALL.max_workgroup_invocations
