"""Kernels of one token: statistics beside products, attention in parts, small maps together."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile.ir.attention_nodes import Attention
from torch_webgpu_compile.ir.graph import AnchorGroup, JointGroup, MapGroup, RowGroup
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler.rewrites.common_nodes import drop_unit_symbols
from torch_webgpu_compile.scheduler.rewrites.split_attention import split_attention
from torch_webgpu_compile.scheduler.rewrites.statistics import recompute_statistics

randn = torch.randn


def rms_norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def run(graph, arguments):
    (result,) = interpret(graph, [x.numpy() for x in arguments])
    return torch.from_numpy(np.asarray(result))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_norm_and_the_products_that_use_it_are_one_kernel(dtype):
    def function(x, g, gate, up):
        y = rms_norm(x, g)
        return F.silu(F.linear(y, gate)) * F.linear(y, up)

    # Products near 1: of larger ones, a rounding of the one is multiplied by the other.
    numbers = randn(1, 1, 64), randn(64), randn(96, 64) / 8, randn(96, 64) / 8
    arguments = tuple(x.to(dtype) for x in numbers)
    state = compile_function(function, *arguments)
    (group,) = state.schedule.groups
    assert isinstance(group, RowGroup)
    assert sum(member.reduction == "sum" for member in group.members) == 3
    moved = recompute_statistics(drop_unit_symbols(state.graph))
    verify_loop_graph(moved)
    if dtype is torch.bfloat16:  # NumPy has none: tests/gpu/test_compiled_decoding.py
        return
    # Sums in another order; of f16 without eager's roundings between the norm and the sum.
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    wanted = function(*arguments)
    torch.testing.assert_close(run(moved, arguments), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, w: (F.linear(y, w), y),  # the norm is a result
        lambda y, w: F.linear(y + 1, w),  # it is not a factor of the sum
        lambda y, w: F.linear(y, w).sum() + y.max(),  # another reduction needs it
    ],
)
def test_a_norm_that_is_needed_by_itself_is_computed_once(function):
    arguments = randn(1, 64), randn(64), randn(96, 64)
    state = compile_function(lambda x, g, w: function(rms_norm(x, g), w), *arguments)
    graph = drop_unit_symbols(state.graph)
    assert recompute_statistics(graph).nodes == graph.nodes


def attention(heads, keys, queries, size, value_size, mask):
    def function(q, k, v):
        bias = torch.arange(keys)[None] < keys // 2 if mask else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    shape = 1, heads
    return function, (
        randn(*shape, queries, size),
        randn(*shape, keys, size),
        randn(*shape, keys, value_size),
    )


@pytest.mark.parametrize("case", [(2, 200, 1, 16, 16, True), (3, 333, 4, 24, 30, False)])
def test_attention_in_parts_is_attention(case):
    function, arguments = attention(*case)
    state = compile_function(function, *arguments)
    graph = split_attention(state.graph, TARGET)
    verify_loop_graph(graph)
    assert max(n.parts for n in graph.nodes if isinstance(n, Attention)) == -(-case[1] // 64)
    torch.testing.assert_close(run(graph, arguments), function(*arguments))
    kinds = [type(group) for group in state.schedule.groups]
    assert kinds == [AnchorGroup, RowGroup]


@pytest.mark.parametrize("case", [(2, 64, 1, 16, 16, False), (5000, 512, 1, 16, 16, False)])
def test_attention_with_few_keys_or_many_heads_stays_whole(case):
    function, arguments = attention(*case)
    state = compile_function(function, *arguments)
    assert split_attention(state.graph, TARGET).nodes == state.graph.nodes


def test_small_maps_over_equal_points_are_one_kernel():
    state = compile_function(lambda x, y: (x.sin(), y.cos()), randn(64), randn(64))
    (group,) = state.schedule.groups
    assert isinstance(group, MapGroup)
    large = compile_function(lambda x, y: (x.sin(), y.cos()), randn(1 << 13), randn(1 << 13))
    (group,) = large.schedule.groups
    assert isinstance(group, JointGroup)  # side by side, not in the same invocations


def test_small_maps_that_need_each_other_by_a_detour_stay_apart():
    def function(x, y):
        a = x.sin()
        total = torch.cumsum(a, 0)
        return a, (total.flip(0) * y).cos()

    groups = compile_function(function, randn(64), randn(64)).schedule.groups
    assert len(groups) > 1


@pytest.mark.parametrize("channels", [1, 3])
def test_all_invocations_of_a_subgroup_add_their_sums(channels):
    """The weight's gradient of one channel is a product of one row: neighbours were left out."""

    def gradient(grad, x, weight):
        options = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        wanted = [False, True, False]
        return torch.ops.aten.convolution_backward(grad, x, weight, None, *options, wanted)[1]

    target = replace(TARGET, features=frozenset({"subgroup"}), subgroup_sizes=(32, 32))
    images = randn(1, channels, 32, 32), randn(1, 4, 32, 32), randn(channels, 4, 1, 1)
    (kernel,) = compile_function(gradient, *images, target=target).plan.kernels
    offsets = {int(found) for found in re.findall(r"subgroupShuffleXor\(.*, (\d+)u\)", kernel.wgsl)}
    assert offsets == {1, 2, 4, 8, 16}


def test_every_column_of_few_rows_is_stored():
    """Of eight, where the invocations that share a sum are a subgroup and need no memory."""
    target = replace(TARGET, features=frozenset({"subgroup"}), subgroup_sizes=(32, 32))
    state = compile_function(F.linear, randn(8, 512), randn(16384, 512), target=target)
    (kernel,) = state.plan.kernels
    assert "var<workgroup>" not in kernel.wgsl
    values = re.findall(r"let value0_\d = (.*);", kernel.wgsl)
    assert re.findall(r"c0_0_(\d)", "".join(values)) == list("01234567")
