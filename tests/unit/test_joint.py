"""Small kernels of any kind in one dispatch, and new rows of caches, without an adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from tests.decoding import Sizes, decode, layers_of
from torch_webgpu_compile.codegen.kernels.joint import generate_joint
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.attention_nodes import Attention
from torch_webgpu_compile.ir.graph import JointGroup, MapGroup, RowGroup, SingleGroup
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.nodes import Scatter, inputs_of
from torch_webgpu_compile.ir.scalar import index
from torch_webgpu_compile.ir.spaces import numbered
from torch_webgpu_compile.ir.text import format_schedule
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.ir.verify_schedule import verify_schedule
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.scheduler.mapping import point_of
from torch_webgpu_compile.scheduler.rewrites.cache_writes import forward_cache_writes
from torch_webgpu_compile.scheduler.rewrites.common_nodes import drop_unit_symbols
from torch_webgpu_compile.scheduler.rewrites.split_attention import split_attention
from torch_webgpu_compile.symbolic.sizes import as_expr

pytestmark = pytest.mark.rotates(3)

randn = torch.randn
LARGE = replace(
    TARGET,
    max_storage_buffers=32,
    max_workgroup_nbytes=48 << 10,
    subgroup_sizes=(32, 32),
    features=TARGET.features | {"subgroup"},
)


def decoding(sizes, dtype=torch.float32, target=LARGE):
    layers = layers_of(sizes, dtype)
    arguments = randn(sizes.batch, 1, sizes.hidden).to(dtype), torch.tensor([7])
    return compile_function(
        lambda x, position: decode(sizes, x, position, layers), *arguments, target=target
    )


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 6), (torch.float16, 8)])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_layer_of_one_token_is_six_dispatches(layers, dtype, count):
    """And two more for norms that are rounded before the products."""
    state = decoding(Sizes(layers=layers), dtype)
    assert state.plan.dispatch_count <= count * layers + 1
    assert sum(isinstance(g, JointGroup) for g in state.schedule.groups) >= 2 * layers
    assert "joint" in format_schedule(state.schedule)
    assert serialize.from_json(serialize.to_json(state.plan)) == state.plan


def test_layers_of_equal_sizes_have_equal_kernels():
    few, many = decoding(Sizes(layers=3)), decoding(Sizes(layers=4))
    assert len(many.plan.kernels) == len(few.plan.kernels)


def test_a_token_of_two_batches_and_a_target_with_few_bindings():
    assert decoding(Sizes(batch=2, layers=2)).plan.dispatch_count <= 18
    state = decoding(Sizes(layers=2), target=TARGET)
    assert state.plan.dispatch_count <= 18
    limit = TARGET.max_storage_buffers
    assert all(len(kernel.bindings) <= limit for kernel in state.plan.kernels)


def test_every_op_stays_visible():
    state = decoding(Sizes(layers=1))
    shown = {op for kernel in state.plan.kernels for op in kernel.ops}
    assert {"aten.index_copy.default", "aten.mm.default", "aten.addmm.default"} <= shown
    (kernel,) = (k for k in state.plan.kernels if "aten.index_copy.default" in k.ops)
    assert kernel.kind == "joint"
    (step,) = (s for s in state.plan.steps if state.plan.kernels[s.kernel] is kernel)
    # Of the caches a row is written, and nothing is read.
    sizes = Sizes()
    assert int(step.bytes_written) == 4 * (2 * sizes.kv_heads + sizes.heads) * sizes.head
    assert int(step.bytes_read) < 4 * sizes.kv_heads * sizes.positions * sizes.head


def test_kinds_that_share_a_dispatch():
    def function(x, y, cache, at, new):
        cache.index_copy_(1, at, new)
        return x.sum(1), y.sin(), torch.softmax(y, 1)

    cache, at = randn(2, 9, 4), torch.tensor([3])
    arguments = randn(30, 50), randn(7, 11), cache, at, randn(2, 1, 4)
    (group,) = compile_function(function, *arguments, target=LARGE).schedule.groups
    assert isinstance(group, JointGroup)
    assert {type(part) for part in group.groups} == {RowGroup, MapGroup, SingleGroup}


def test_large_kernels_stay_apart():
    def function(x, y):
        return x.sum(1), y.sum(0)

    small = compile_function(function, randn(64, 64), randn(64, 96), target=LARGE)
    assert small.plan.dispatch_count == 1
    size = 3 << 10  # 36 MiB
    large = compile_function(function, randn(size, size), randn(size, size), target=LARGE)
    assert not any(isinstance(group, JointGroup) for group in large.schedule.groups)


def test_what_needs_another_stays_apart():
    def function(x):
        y = x.sum(1)
        return y, torch.outer(y, y).amax(0), x.amax(0)

    state = compile_function(function, randn(40, 40), target=LARGE)
    assert state.plan.dispatch_count == 2


def test_a_scatter_that_copies_first_stays_alone():
    def function(x, at, new):
        return x.index_copy(1, at, new), new.sum(0)

    state = compile_function(
        function, randn(2, 9, 4), torch.tensor([3]), randn(2, 1, 4), target=LARGE
    )
    assert not any(isinstance(group, JointGroup) for group in state.schedule.groups)


def test_the_longest_workgroups_come_first():
    def function(x, y):
        return x.sum(1), y.sum(1)

    state = compile_function(function, randn(5, 8), randn(4, 4096), target=LARGE)
    (kernel,) = state.plan.kernels
    first, second = (kernel.wgsl.index(f"fn part{k}") for k in (0, 1))
    assert "store_x3" in kernel.wgsl[first:second]  # of y, whose rows are long
    assert "store_x1" in kernel.wgsl[second:]


def test_the_verifier_finds_parts_that_need_each_other():
    state = compile_function(lambda x: (x.sum(1) * 2).cumsum(0).sin(), randn(40, 40), target=LARGE)
    parts = tuple(g for g in state.schedule.groups if isinstance(g, RowGroup | MapGroup))
    wrong = replace(state.schedule, groups=(JointGroup(parts),))
    with pytest.raises(VerificationError, match="do not need each other"):
        verify_schedule(wrong, LARGE)


def test_parts_that_are_alike_have_their_code_once_and_others_are_refused():
    def function(x, y, z):
        return x.sum(1), y.sum(1), z.sum(0)

    state = compile_function(function, randn(3, 40), randn(3, 40), randn(3, 40), target=LARGE)
    (group,) = state.schedule.groups
    assert isinstance(group, JointGroup)
    alike = JointGroup(group.groups[:2], are_alike=True)
    schedule = replace(state.schedule, groups=(replace(group, are_alike=True),))
    with pytest.raises(VerificationError, match="names of buffers only"):
        verify_schedule(schedule, LARGE)
    call = generate_joint(alike, state.schedule.graph.buffers, LARGE)
    assert call.kernel.wgsl.count("fn part") == 1
    assert [binding.buffer for binding in call.step.bindings[:2]] == ["in0", "in1"]


def test_the_verifier_finds_a_part_that_overwrites_what_another_one_reads():
    def function(cache, at, new):
        before = cache.exp()
        cache.index_copy_(1, at, new)
        return before

    state = compile_function(
        function, randn(2, 9, 4), torch.tensor([3]), randn(2, 1, 4), target=LARGE
    )
    assert len(state.schedule.groups) == 2
    wrong = replace(state.schedule, groups=(JointGroup(state.schedule.groups),))
    with pytest.raises(VerificationError, match="no other reader"):
        verify_schedule(wrong, LARGE)


# ---- rows of caches


def cached(keys, values, q, new, at):
    keys.index_copy_(2, at, new[..., :16])
    values.index_copy_(2, at, new[..., 16:] * 2)
    return F.scaled_dot_product_attention(q, keys, values)


def rows_read(function, *arguments, target=LARGE):
    """The graph in which attention reads new rows, after a check of its results."""
    state = compile_function(function, *(a.clone() for a in arguments), target=target)
    before = drop_unit_symbols(split_attention(state.graph, target))
    graph = forward_cache_writes(before, target)
    verify_loop_graph(graph)
    by_size = {tuple(a.shape): a.numpy() for a in arguments}  # Dynamo orders them by first use
    given = [by_size[tuple(map(int, graph.buffers[i.buffer].sizes))] for i in graph.inputs]
    for one, other in zip(interpret(graph, given), interpret(before, given), strict=True):
        np.testing.assert_allclose(one, other)
    return graph


def waits(graph) -> bool:
    """Whether attention reads the result of a scatter."""
    written = {node.output for node in graph.nodes if isinstance(node, Scatter)}
    (attention,) = (node for node in graph.nodes if isinstance(node, Attention))
    return not written.isdisjoint(inputs_of(attention))


ARGUMENTS = (
    randn(1, 2, 130, 16),
    randn(1, 2, 130, 24),
    randn(1, 2, 1, 16),
    randn(1, 2, 1, 40),
    torch.tensor([5]),
)


def test_attention_reads_new_rows_where_they_are_computed():
    assert not waits(rows_read(cached, *ARGUMENTS))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 16), (1, 2, 1, 8)])
def test_attention_waits_for_parts_of_a_row(sizes):
    state = compile_function(cached, *(a.clone() for a in ARGUMENTS), target=LARGE)
    graph = drop_unit_symbols(split_attention(state.graph, LARGE))
    ranges = tuple(map(as_expr, sizes))
    symbols = [index(s) for s in point_of(numbered("i", ranges))]
    nodes = [
        replace(node, ranges=ranges, index=(*symbols[:2], node.index[2], symbols[3]))
        if isinstance(node, Scatter)
        else node
        for node in graph.nodes
    ]
    partial = graph.with_nodes(tuple(nodes), graph.buffers)
    assert forward_cache_writes(partial, LARGE).nodes == partial.nodes


def several_rows(keys, values, q, new, at):
    keys.index_copy_(2, torch.cat([at, at + 1]), new[..., :16].expand(1, 2, 2, 16))
    return F.scaled_dot_product_attention(q, keys, values)


def places(keys, values, q, new, at):
    keys[:, at // 9, at] = new[:, 0, :, :16]
    return F.scaled_dot_product_attention(q, keys, values)


def needed_by_others(keys, values, q, new, at):
    keys.index_copy_(2, at, new[..., :16])
    return F.scaled_dot_product_attention(q, keys, values), keys.sum(2)


def not_in_place(keys, values, q, new, at):
    return F.scaled_dot_product_attention(q, keys.index_copy(2, at, new[..., :16]), values)


def added(keys, values, q, new, at):
    keys.index_add_(2, at, new[..., :16])
    return F.scaled_dot_product_attention(q, keys, values)


@pytest.mark.parametrize("function", [several_rows, places, needed_by_others, not_in_place, added])
def test_attention_waits_for_other_scatters(function):
    assert waits(rows_read(function, *ARGUMENTS))


def test_attention_waits_where_bindings_are_few():
    assert waits(rows_read(cached, *ARGUMENTS, target=replace(TARGET, max_storage_buffers=4)))
