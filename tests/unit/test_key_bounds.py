"""Masks of which attention kernels know where they end, from data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.compilations import TARGET, compile_function
from torch_webgpu_compile.ir.attention_nodes import Attention
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.scheduler import cost
from torch_webgpu_compile.scheduler.rewrites.causal import find_causal_masks
from torch_webgpu_compile.scheduler.rewrites.common_nodes import drop_unit_symbols
from torch_webgpu_compile.scheduler.rewrites.key_bounds import bound_keys_by_mask
from torch_webgpu_compile.scheduler.rewrites.split_attention import split_attention
from torch_webgpu_compile.target import Machine

pytestmark = pytest.mark.rotates(4)

KEYS = 200
EAGER = replace(TARGET, machine=Machine(dispatch_seconds=1e-12))  # any key is worth not to be read
LOWEST = torch.finfo(torch.float32).min


def at_most(q, k, at):
    return k <= q + at


def below(q, k, at):
    return at + q > k


def with_padding(q, k, at):
    return (k <= q + at) & (k % 7 != 3)


def window(q, k, at):
    return torch.logical_and(k > q + at - 50, k < at + q + 1)


def of_each_batch(q, k, at):
    return k <= torch.stack([at, at // 2])[:, None, None, None] + q


def additive(q, k, at):
    return torch.where(k <= q + at, (k - q) * 0.1, -torch.inf)


def lowest(q, k, at):
    return torch.where(k <= q + at, 0.0, LOWEST)


def falls(q, k, at):
    return k <= at - q


def starts(q, k, at):
    return k >= q + at


def either(q, k, at):
    return (k <= q + at) | (k == 150)


def doubled(q, k, at):
    return 2 * k <= q + at


def lowest_and_padding(q, k, at):
    return torch.where((k <= q + at) & (k % 7 != 3), 0.0, LOWEST)


def ended(mask, queries, at, target=EAGER):
    def function(x, y, at):
        q, k = torch.arange(queries)[:, None], torch.arange(KEYS)
        return F.scaled_dot_product_attention(x, y, y * 2, attn_mask=mask(q, k, at))

    arguments = torch.randn(2, 3, queries, 8), torch.randn(2, 3, KEYS, 8), torch.tensor(at)
    state = compile_function(function, *arguments, target=target)
    graph = find_causal_masks(drop_unit_symbols(split_attention(state.graph, target)))
    changed = bound_keys_by_mask(graph, target)
    (node,) = (node for node in changed.nodes if isinstance(node, Attention))

    def check(at):
        x, y, _ = arguments
        given = y, torch.tensor(at), x  # in the order in which the function uses them
        (found,) = interpret(changed, [value.numpy().reshape(-1) for value in given])
        wanted = function(x, y, torch.tensor(at))
        torch.testing.assert_close(torch.from_numpy(np.asarray(found)), wanted)

    return node, check


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize(
    "mask", [at_most, below, with_padding, window, of_each_batch, additive, lowest]
)
def test_masks_that_end(mask, queries):
    node, check = ended(mask, queries, 5)
    # What like -1e9 leaves nothing of is all the same to a row: only one query may have such a row.
    assert (node.end is None) == (mask is lowest and queries > 1)
    alone = queries == 1 and mask in (at_most, below, of_each_batch)
    assert (node.bias is None) == alone
    for at in (5, 0, KEYS - 1, KEYS + 9, -1, -KEYS, 2**62):
        check(at)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("mask", [starts, either, doubled, lowest_and_padding])
def test_masks_that_do_not_end(mask, queries):
    node, _ = ended(mask, queries, 5)
    assert node.end is None


def test_an_end_that_falls_from_query_to_query_is_none():
    assert ended(falls, 3, 5)[0].end is None
    assert ended(falls, 1, 5)[0].end is not None


def test_short_caches_are_read_without_waiting_for_the_end():
    assert ended(at_most, 1, 5, TARGET)[0].end is None
    assert not cost.waits_for_key_end(2 << 20, TARGET)  # 1024 positions of a 1B model in bf16
    assert cost.waits_for_key_end(16 << 20, TARGET)
