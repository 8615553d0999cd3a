"""Which nodes are inlined, which share a kernel, and in which order kernels run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.compilations import OPTIONS, TARGET, compile_function
from tests.harness import run_graph
from torch_webgpu_compile.compiler import compile_graph
from torch_webgpu_compile.ir.graph import (
    AnchorGroup,
    JointGroup,
    LoopGraph,
    MapGroup,
    RowGroup,
    Schedule,
    SingleGroup,
)
from torch_webgpu_compile.ir.nodes import Contraction, inputs_of, outputs_of
from torch_webgpu_compile.ir.scalar import loads_of
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler.rewrites.common_nodes import eliminate_common_nodes
from torch_webgpu_compile.scheduler.rewrites.inline import inline_producers
from torch_webgpu_compile.scheduler.rewrites.split import split_contractions
from torch_webgpu_compile.symbolic.sizes import product

randn = torch.randn


def groups_of(function, *arguments, **options):
    return compile_function(function, *arguments, **options).schedule.groups


def kinds(function, *arguments, **options):
    names = {MapGroup: "map", RowGroup: "row", AnchorGroup: "anchor", SingleGroup: "single"}
    groups = groups_of(function, *arguments, **options)
    parts = [p for g in groups for p in (g.groups if isinstance(g, JointGroup) else (g,))]
    return [names[type(part)] for part in parts]


# ---- inlining


def inlined(function, *arguments) -> LoopGraph:
    return inline_producers(compile_function(function, *arguments).graph, TARGET)


def test_a_chain_becomes_one_node():
    graph = inlined(lambda x: torch.tanh(x * 2 + 1).abs() - 3, randn(5, 7))
    assert len(graph.nodes) == 1


@pytest.mark.parametrize(
    ("rows", "has_units", "wanted"),
    [(256, True, ["anchor"]), (4096, True, ["map", "anchor"]), (256, False, ["map", "anchor"])],
)
def test_weights_are_dequantized_for_few_tiles_of_matrix_units(rows, has_units, wanted):
    """Every tile of rows makes them again: where that costs more, they are stored in between."""
    config = ("f16", "f32", 16, 16, 16)
    target = replace(
        TARGET,
        features=TARGET.features | {"subgroup"},
        subgroup_sizes=(32, 32),
        subgroup_matrix_configs=(config,) if has_units else (),
    )

    def function(x, levels, scale):
        return F.linear(x, ((levels & 15) - 8).half() * scale)

    levels = torch.ones(4096, 64, dtype=torch.int8)
    arguments = randn(rows, 64).half(), levels, randn(4096, 1).half()
    assert kinds(function, *arguments, target=target) == wanted


def test_a_producer_of_two_readers_is_computed_once_when_it_is_expensive():
    def function(x):
        y = torch.tanh(torch.sin(x) + torch.exp(x))
        return y[:, 1:] + y[:, :-1]

    assert len(inlined(function, randn(64, 33)).nodes) == 2


def test_an_expensive_value_is_not_recomputed_per_row():
    def function(x, y):
        return torch.exp(torch.sin(x)) * y

    assert len(inlined(function, randn(1, 64), randn(64, 64)).nodes) == 2


def test_a_returned_value_is_kept():
    graph = inlined(lambda x: (x + 1, (x + 1) * 2), randn(9))
    assert graph.returned <= {name for node in graph.nodes for name in outputs_of(node)}


# ---- groups


@pytest.mark.parametrize(
    ("function", "arguments", "wanted"),
    [
        (lambda x: (x.sum(1), x.amax(1)), [randn(8, 32)], ["row"]),
        (lambda x: (x.sum(1) + 1, x * 2), [randn(8, 32)], ["row", "map"]),
        (lambda x: torch.relu(x).sum((0, 2)), [randn(4, 5, 6)], ["row"]),
        (lambda x: x.sum(1).sum(0), [randn(8, 32)], ["row", "row"]),
        (lambda x, w: (x @ w).t(), [randn(8, 8), randn(8, 8)], ["anchor"]),
        (
            lambda x, w: (x @ w).view(8, 2, 4).transpose(0, 1).contiguous(),
            [randn(8, 8), randn(8, 8)],
            ["anchor"],
        ),
        (lambda x, w: torch.softmax(x @ w, -1), [randn(8, 8), randn(8, 8)], ["anchor", "row"]),
        (lambda x: (x + 1, x.t() * 2), [randn(8, 9)], ["map", "map"]),
        (lambda x: x.t().reshape(-1).reshape(9, 8)[1:, ::2] + 1, [randn(8, 9)], ["map"]),
    ],
)
def test_groups(function, arguments, wanted):
    assert sorted(kinds(function, *arguments)) == sorted(wanted)


def test_an_epilogue_keeps_the_anchor_when_it_is_returned():
    def function(x, w):
        y = x @ w
        return y, torch.relu(y)

    (group,) = groups_of(function, randn(8, 8), randn(8, 8))
    assert isinstance(group, AnchorGroup)
    assert group.store_anchor
    assert [m.store for m in group.epilogue] == [True]


def test_a_diamond_around_a_matmul_has_no_cycle():
    def function(x, w):
        y = torch.relu(x)
        z = y @ w
        return y * z, (z + y).sum(1)

    check_order(compile_function(function, randn(8, 8), randn(8, 8)).schedule)


def test_bindings_stay_within_the_limit():
    def function(*tensors):
        return [sum(tensors), *(t * 2 for t in tensors)]

    tensors = [randn(16) for _ in range(12)]
    for limit in (4, 8):
        target = replace(TARGET, max_storage_buffers=limit)
        state = compile_function(function, *tensors, target=target)
        bound = [len(kernel.bindings) for kernel in state.plan.kernels]
        # A single node of many inputs cannot be divided by fusion decisions.
        assert all(count <= max(limit, 13) for count in bound)
        assert sum(count > limit for count in bound) <= 1


def reads_and_writes(group) -> tuple[set[str], set[str]]:
    match group:
        case MapGroup() | RowGroup():
            members, anchor = group.members, None
        case AnchorGroup():
            members, anchor = group.epilogue, group.anchor
        case SingleGroup():
            return set(inputs_of(group.node)), set(outputs_of(group.node))
        case JointGroup():
            parts = list(map(reads_and_writes, group.groups))
            assert not set().union(*(r for r, _ in parts)) & set().union(*(w for _, w in parts))
            return set().union(*(r for r, _ in parts)), set().union(*(w for _, w in parts))
    inside = {m.output for m in members} | (set() if anchor is None else {anchor.output})
    reads = {load.buffer for m in members for load in loads_of(m.body)}
    if anchor is not None:
        reads |= set(inputs_of(anchor))
    writes = {m.output for m in members if m.store}
    if anchor is not None and group.store_anchor:
        writes.add(anchor.output)
    return reads - inside, writes


def check_order(made: Schedule) -> None:
    """Everything that a group reads has been written, and everything returned is written once."""
    given_buffers = {n for n, b in made.graph.buffers.items() if b.origin.value != "intermediate"}
    written = set(given_buffers)
    for group in made.groups:
        reads, writes = reads_and_writes(group)
        assert reads <= written, reads - written
        assert not writes & (written - given_buffers)
        written |= writes
    needed = {n for n in made.graph.returned if made.graph.buffers[n].numel.constant != 0}
    assert needed <= written


STEPS = {
    "relu": lambda a, b: torch.relu(a),
    "add": lambda a, b: a + b,
    "transpose": lambda a, b: a.t() * b,
    "matmul": lambda a, b: a @ b,
    "softmax": lambda a, b: torch.softmax(a, -1),
    "columns": lambda a, b: a - b.mean(0, keepdim=True),
    "rows": lambda a, b: a * b.sum(1, keepdim=True),
    "norm": lambda a, b: F.layer_norm(a, (8,)),
    "flip": lambda a, b: a.flip(0) + b,
    "cat": lambda a, b: torch.cat([a, b])[4:12],
}


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 3),
)
def test_random_graphs_run_in_a_valid_order(steps, results):
    def function(x, y):
        values = [x, y]
        for name, a, b in steps:
            values.append(STEPS[name](values[a % len(values)], values[b % len(values)]))
        return values[-results:] if len(values) - results >= 2 else values[2:]

    check_order(compile_function(function, randn(8, 8), randn(8, 8)).schedule)


def test_scheduling_is_deterministic():
    state = compile_function(lambda x: torch.softmax(x @ x, -1) + 1, randn(8, 8))
    again = compile_graph(state.captured, state.phase, TARGET, OPTIONS, use_cache=False)
    assert again.program == state.program


# ---- nodes that repeat others


def test_what_is_computed_twice_is_computed_once():
    def function(x, w):
        first, second = torch.tanh(x).cumsum(0), torch.tanh(x).cumsum(0)
        return first @ w + second.sum(1, keepdim=True)

    graph = compile_function(function, randn(5, 16), randn(16, 4)).graph
    shared = eliminate_common_nodes(graph)
    verify_loop_graph(shared)
    assert len(shared.nodes) < len(graph.nodes)
    arguments = [randn(5, 16), randn(16, 4)]
    torch.testing.assert_close(run_graph(shared, arguments)[0], function(*arguments))


def test_results_stay_when_they_are_equal():
    graph = compile_function(lambda x: (x + 1, x + 1), randn(7)).graph
    assert eliminate_common_nodes(graph).returned == graph.returned


def test_a_mask_is_converted_once():
    def function(x, mask):
        bias = torch.where(mask.cumsum(1) > 3, 0.0, -1e30).unsqueeze(1)
        for _ in range(3):
            x = F.scaled_dot_product_attention(x, x, x, bias.clone())
        return x

    mask = torch.ones(2, 32, 32, dtype=torch.int64)
    assert kinds(function, randn(2, 2, 32, 16), mask).count("anchor") == 3
    assert len(kinds(function, randn(2, 2, 32, 16), mask)) == 4


# ---- contractions of small results over a long inner dimension


def _residual(x, w, y):
    total = x @ w + y
    return total, F.layer_norm(total, total.shape[-1:])


LONG = {
    "matmul": (lambda x, w: x @ w, [(64, 2048), (2048, 128)]),
    "batched": (lambda w, x: x @ w.mT, [(2, 150, 1536), (2, 70, 1536)]),
    "residual": (_residual, [(64, 2048), (2048, 128), (64, 128)]),
    "convolution": (
        lambda x, w: F.conv2d(x, w, padding=1),
        [(2, 256, 9, 9), (128, 256, 3, 3)],
    ),
    "odd": (lambda x, w: x @ w, [(65, 2051), (2051, 127)]),
    "weight": (lambda y, x: y.mT @ x, [(12544, 96), (12544, 64)]),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_inner_dimension_is_split(name):
    function, sizes = LONG[name]
    arguments = [randn(s) / 8 for s in sizes]
    graph = compile_function(function, *arguments).graph
    divided = split_contractions(graph, TARGET)
    verify_loop_graph(divided)
    (before,) = (n for n in graph.nodes if isinstance(n, Contraction))
    (after,) = (n for n in divided.nodes if isinstance(n, Contraction))
    parts = int(after.batch[0])
    assert parts > 1
    assert 0 <= parts * int(product(after.inner)) - int(product(before.inner)) < 16 * parts
    found = run_graph(divided, arguments)
    expected = function(*arguments)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_long_sum_of_integers_is_split():
    x, w = (torch.full(sizes, -128, dtype=torch.int8) for sizes in ((64, 2048), (2048, 128)))
    divided = split_contractions(compile_function(torch._int_mm, x, w).graph, TARGET)
    verify_loop_graph(divided)
    (node,) = (n for n in divided.nodes if isinstance(n, Contraction))
    assert int(node.batch[0]) > 1
    (found,) = run_graph(divided, [x, w])
    assert torch.equal(found, x.int() @ w.int())


def _projection(x, w, bias, y):
    """As transformers have it: a product of rows, added to a batch of sequences."""
    total = torch.addmm(bias, x, w).view(y.shape) + y
    return total, F.layer_norm(total, total.shape[-1:])


def test_parts_are_added_where_they_are_used():
    function, sizes = LONG["residual"]
    assert kinds(function, *map(randn, sizes)) == ["anchor", "row"]
    for batch in (1, 2):
        sizes = [(64, 2048), (2048, 128), (128,), (batch, 64 // batch, 128)]
        assert kinds(_projection, *map(randn, sizes)) == ["anchor", "row"]


@pytest.mark.parametrize("sizes", [(4096, 2048, 4096), (64, 300, 128), (8, 4096, 4096)])
def test_what_fills_a_gpu_or_is_short_is_not_split(sizes):
    rows, inner, columns = sizes
    graph = compile_function(torch.mm, randn(rows, inner), randn(inner, columns)).graph
    assert split_contractions(graph, TARGET).nodes == graph.nodes
