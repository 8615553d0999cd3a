"""Masks of which attention kernels know that they are causal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.compilations import compile_function
from torch_webgpu_compile.ir.attention_nodes import Attention
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.scheduler.rewrites.causal import find_causal_masks

pytestmark = pytest.mark.rotates(6)

LENGTH = 12


def positions(x):
    n = x.shape[-2]
    return torch.arange(n).unsqueeze(1), torch.arange(n)


def attention_of(graph):
    (node,) = (node for node in graph.nodes if isinstance(node, Attention))
    return node


def tril(x, _):
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()


def documents(x, ids):
    q, k = positions(x)
    return (k <= q) & (ids.unsqueeze(1) == ids)


def window(x, _):
    q, k = positions(x)
    return torch.logical_and(k < q + 1, k > q - 4)


def earlier(x, _):
    q, k = positions(x)
    return (k + 2 <= q) | (k == 0)


def shifted(x, _):
    q, k = positions(x)
    return q + 1 > k


def additive(x, _):
    q, k = positions(x)
    return torch.where(q >= k, (k - q) * 0.5, -torch.inf)


def reversed_mask(x, _):
    q, k = positions(x)
    return k >= q


def next_key(x, _):
    q, k = positions(x)
    return k <= q + 1


def lowest(x, _):
    q, k = positions(x)
    return torch.where(k <= q, 0.0, torch.finfo(torch.float32).min)


def strictly_lowest(x, _):
    """The first query has weights of what is masked."""
    q, k = positions(x)
    return torch.where(k < q, 0.0, torch.finfo(torch.float32).min)


def one_document(x, _):
    """As transformers computes it, from positions."""
    position = torch.arange(x.shape[-2])
    ids = (torch.diff(position, prepend=position[:1] - 1) != 1).cumsum(0)
    return documents(x, ids)


def on_both_sides(x, _):
    q, k = positions(x)
    return (q - k).abs() <= 2


def nearby(x, _):
    q, k = positions(x)
    return (q - k <= 2) & (k - q <= 2)


def either(x, ids):
    q, k = positions(x)
    return (k <= q) | (ids.unsqueeze(1) == ids)


CAUSAL = {
    tril: False,
    shifted: False,
    one_document: False,
    documents: True,
    window: False,
    additive: True,
    lowest: False,
}
OTHERS = (earlier, reversed_mask, next_key, either, strictly_lowest, on_both_sides, nearby)
WINDOWS = {window: 3, nearby: 2, reversed_mask: 0}


@pytest.mark.parametrize("mask", [*CAUSAL, *OTHERS], ids=lambda f: f.__name__)
def test_masks(mask):
    def function(q, k, v, ids):
        return F.scaled_dot_product_attention(q + 0, k + 0, v + 0, mask(q, ids))

    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    arguments = q, k, v, torch.tensor([0] * 5 + [1] * 7)
    state = compile_function(function, *arguments)
    inputs = [x.numpy() for x in (arguments if len(state.graph.inputs) == 4 else (q, k, v))]
    found = find_causal_masks(state.graph)
    node = attention_of(found)
    assert node.causal == (mask in CAUSAL)
    assert node.window == WINDOWS.get(mask)
    assert (node.bias is not None) == CAUSAL.get(mask, True)
    for graph in (state.graph, found):
        (result,) = interpret(graph, inputs)
        torch.testing.assert_close(torch.from_numpy(np.asarray(result)), function(*arguments))


@pytest.mark.parametrize("starts", [(0, 0), (0, 5)], ids=["one document each", "other documents"])
def test_masks_of_constants_for_each_sequence(starts):
    """As transformers finds documents of packed sequences by their positions."""

    def function(q, k, v):
        queries, keys = positions(q)
        ids = torch.stack([(keys >= start).cumsum(-1) * (start > 0) for start in starts])
        mask = (keys <= queries) & (ids.unsqueeze(2) == ids.unsqueeze(1))
        return F.scaled_dot_product_attention(q, k, v, mask.unsqueeze(1))

    arguments = [torch.randn(2, 2, LENGTH, 8) for _ in range(3)]
    found = find_causal_masks(compile_function(function, *arguments).graph)
    node = attention_of(found)
    assert node.causal
    assert (node.bias is None) == (starts == (0, 0))
    (result,) = interpret(found, [x.numpy() for x in arguments])
    torch.testing.assert_close(torch.from_numpy(np.asarray(result)), function(*arguments))


def test_a_bias_that_is_an_argument_is_left_alone():
    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    state = compile_function(F.scaled_dot_product_attention, q, k, v, torch.randn(LENGTH, LENGTH))
    assert find_causal_masks(state.graph) is state.graph


def test_one_query_at_a_position_is_not_causal():
    def function(q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, torch.arange(LENGTH) <= position)

    q = torch.randn(1, 2, 1, 8)
    k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(2))
    state = compile_function(function, q, k, v, torch.tensor([[5]]))
    assert not attention_of(find_causal_masks(state.graph)).causal


@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_a_mask_of_zeros_is_dropped(bias):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, torch.full((LENGTH, LENGTH), bias))

    state = compile_function(function, *(torch.randn(1, 2, LENGTH, 8) for _ in range(3)))
    assert (attention_of(find_causal_masks(state.graph)).bias is None) == (bias == 0.0)


def ones(q, k):
    return torch.ones(q.shape[2], k.shape[2])


LATER = {
    "tril == 0": lambda q, k: ones(q, k).tril() == 0,
    "~tril": lambda q, k: ~torch.tril(ones(q, k).bool()),
    "not tril": lambda q, k: ones(q, k).tril().bool().logical_not(),
    "triu != 0": lambda q, k: torch.triu(ones(q, k), 1) != 0,
    "triu": lambda q, k: torch.triu(ones(q, k), 1).bool(),
    "long": lambda q, k: ones(q, k).long().tril() == 0,
    "positions": lambda q, k: torch.arange(q.shape[2])[:, None] < torch.arange(k.shape[2]),
    "not positions": lambda q, k: ~(torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])),
    "neither": lambda q, k: ~(torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("mask", LATER)
def test_what_replaces_scores(mask, value, dynamic):
    def function(q, k, v):
        return (q @ k.mT).masked_fill(LATER[mask](q, k), value).softmax(-1) @ v

    inputs = [torch.randn(1, 2, LENGTH, 8) for _ in range(3)]
    state = compile_function(function, *inputs, dynamic=dynamic)
    node = attention_of(find_causal_masks(state.graph))
    assert (node.causal, node.bias, node.replaced) == (True, None, None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("value", [-math.inf, -1e9, -1e4])
def test_padding_beside_what_replaces_scores(value, dynamic):
    """A first document without keys has NaN, or weights of all keys, after its query too."""

    def function(q, k, padded, v):
        later = torch.ones(q.shape[2], k.shape[2]).tril() == 0
        return (q @ k.mT).masked_fill(later | padded, value).softmax(-1) @ v

    inputs = [torch.randn(2, 2, LENGTH, 8) for _ in range(3)]
    inputs.insert(2, (torch.arange(LENGTH) < 3).repeat(2, 1, 1, 1))
    state = compile_function(function, *inputs, dynamic=dynamic)
    found = find_causal_masks(state.graph)
    node = attention_of(found)
    assert node.causal == (value == -math.inf)
    assert node.bias is not None
    assert node.replaced is not None
    if not dynamic:
        (result,) = interpret(found, [x.numpy() for x in inputs])
        wanted = function(*inputs)
        torch.testing.assert_close(torch.tensor(result), wanted, equal_nan=True)


def test_a_value_that_scores_may_reach_is_left_alone():
    def function(q, k, v):
        later = torch.ones(q.shape[2], k.shape[2]).tril() == 0
        return (q @ k.mT).masked_fill(later, -1e4).softmax(-1) @ v

    state = compile_function(function, *(torch.randn(1, 2, LENGTH, 8) for _ in range(3)))
    assert not attention_of(find_causal_masks(state.graph)).causal
