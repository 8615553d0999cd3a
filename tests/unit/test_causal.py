"""Masks of which attention kernels know that they are causal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.compilations import compile_function
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.nodes import Attention
from torch_webgpu_compile.scheduler.causal import find_causal

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


def either(x, ids):
    q, k = positions(x)
    return (k <= q) | (ids.unsqueeze(1) == ids)


CAUSAL = {
    tril: False,
    shifted: False,
    one_document: False,
    documents: True,
    window: True,
    additive: True,
    lowest: False,
}
OTHERS = (earlier, reversed_mask, next_key, either, strictly_lowest)


@pytest.mark.parametrize("mask", [*CAUSAL, *OTHERS], ids=lambda f: f.__name__)
def test_masks(mask):
    def function(q, k, v, ids):
        return F.scaled_dot_product_attention(q + 0, k + 0, v + 0, mask(q, ids))

    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    arguments = q, k, v, torch.tensor([0] * 5 + [1] * 7)
    state = compile_function(function, *arguments)
    inputs = [x.numpy() for x in (arguments if len(state.graph.inputs) == 4 else (q, k, v))]
    found = find_causal(state.graph)
    node = attention_of(found)
    assert node.causal == (mask in CAUSAL)
    assert (node.bias is not None) == CAUSAL.get(mask, True)
    for graph in (state.graph, found):
        (result,) = interpret(graph, inputs)
        torch.testing.assert_close(torch.from_numpy(np.asarray(result)), function(*arguments))


def test_a_bias_that_is_an_argument_is_left_alone():
    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    state = compile_function(F.scaled_dot_product_attention, q, k, v, torch.randn(LENGTH, LENGTH))
    assert find_causal(state.graph) is state.graph


def test_one_query_at_a_position_is_not_causal():
    def function(q, k, v, position):
        return F.scaled_dot_product_attention(q, k, v, torch.arange(LENGTH) <= position)

    q = torch.randn(1, 2, 1, 8)
    k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(2))
    state = compile_function(function, q, k, v, torch.tensor([[5]]))
    assert not attention_of(find_causal(state.graph)).causal


@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_a_mask_of_zeros_is_dropped(bias):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, torch.full((LENGTH, LENGTH), bias))

    state = compile_function(function, *(torch.randn(1, 2, LENGTH, 8) for _ in range(3)))
    assert (attention_of(find_causal(state.graph)).bias is None) == (bias == 0.0)
