"""Attention as softmax written out has it, lowered and interpreted, against plain operators."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.harness import TARGET, capture, check, compare, lower_checked, run_graph
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.attention_nodes import Attention, AttentionGradient
from torch_webgpu_compile.ir.nodes import inputs_of
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.scheduler.rewrites.split_attention import split_attention
from torch_webgpu_compile.target import Target
from torch_webgpu_compile.torch_ops import attention_ops

FILLS = [-math.inf, -3e38, -1e9, -1e4, 0.5]
SHAPES = [((2, 4, 5, 8), (2, 2, 7, 8)), ((1, 2, 1, 8), (1, 2, 200, 8)), ((1, 3, 33, 8),) * 2]


def written(q, k, v, replaced, fill):
    """The same by ordinary operators, for which autograd knows the gradient."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(replaced, fill)
    return scores.softmax(-1) @ v


def operators(fill):
    """Attention's two results and the gradients of query, key and value, by the operators."""

    def run(q, k, v, replaced, grad):
        bias = torch.where(replaced, fill, 0.0)
        rest = False, 0.25, None, 0.0, replaced, False
        output, statistic = torch.ops.webgpu.attention(q, k, v, bias, *rest)
        delta = (grad * output).sum(-1)
        gradients = torch.ops.webgpu.attention_backward(
            grad, q, k, v, bias, statistic, delta, *rest
        )
        return output, statistic, *gradients

    return run


def tensors(shapes):
    torch.manual_seed(0)
    q, k, v = torch.randn(shapes[0]), torch.randn(shapes[1]), torch.randn(shapes[1])
    replaced = torch.rand(shapes[0][0], 1, shapes[0][2], shapes[1][2]) < 0.4
    replaced[0, :, -1] = True  # a row without keys
    return q, k, v, replaced, torch.randn(shapes[0])


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("fill", FILLS)
def test_the_operators_are_what_is_written(shapes, fill):
    q, k, v, replaced, grad = tensors(shapes)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = written(q, k, v, replaced, fill)
    gradients = torch.autograd.grad(wanted, leaves, grad)
    with torch.no_grad():
        output, _, *found = operators(fill)(q, k, v, replaced, grad)
    torch.testing.assert_close(output, wanted, equal_nan=True)
    torch.testing.assert_close(found, list(gradients), equal_nan=True)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("fill", FILLS)
def test_lowered(shapes, fill):
    inputs = tensors(shapes)
    graph = check(operators(fill), *inputs)
    nodes = [node for node in graph.nodes if isinstance(node, Attention | AttentionGradient)]
    assert [getattr(node, "of", "") for node in nodes] == ["", "queries", "keys"]


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_parts(fill):
    def run(q, k, v, replaced, _):
        bias = torch.where(replaced, fill, 0.0)
        rest = False, 0.25, None, 0.0, replaced, False
        return torch.ops.webgpu.attention(q, k, v, bias, *rest)[0]

    inputs = tensors(((2, 2, 1, 8), (2, 2, 200, 8)))
    graph = split_attention(lower_checked(capture(run, *inputs)), TARGET)
    assert [n.parts > 1 for n in graph.nodes if isinstance(n, Attention)] == [True]
    compare(run_graph(graph, list(inputs)), [run(*inputs)])


def test_products_that_are_replaced_may_be_nan():
    q, k, v, replaced, grad = tensors(SHAPES[2])
    replaced[..., 3] = True
    k[..., 3, :] = math.nan

    def run(q, k, v, replaced):
        return operators(-1e9)(q, k, v, replaced, grad)[0]

    check(run, q, k, v, replaced)
    assert run(q, k, v, replaced).isfinite().all()


def test_wrong_nodes_are_found():
    graph = lower_checked(capture(operators(-1e9), *tensors(SHAPES[0])))
    for position, node in enumerate(graph.nodes):
        if not isinstance(node, Attention | AttentionGradient):
            continue
        wrong = [replace(node, replaced=node.bias)]
        if isinstance(node, Attention):
            wrong.append(replace(node, safe=True))
        for other in wrong:
            nodes = (*graph.nodes[:position], other, *graph.nodes[position + 1 :])
            with pytest.raises(VerificationError):
                verify_loop_graph(replace(graph, nodes=nodes))


def test_a_gradient_of_the_bias_is_one_of_the_value():
    """Autograd through the operator: what replaces scores may be learned."""
    q, k, v, replaced, grad = tensors(SHAPES[0])
    value = torch.tensor(-1.5, requires_grad=True)

    def by_operator(value):
        bias = torch.where(replaced, value, 0.0)
        options = attention_ops.AttentionOptions(bias, False, 0.25, None, 0.0, replaced, False)
        return attention_ops.attend(q, k, v, options)[0]

    (found,) = torch.autograd.grad(by_operator(value), value, grad)
    (wanted,) = torch.autograd.grad(written(q, k, v, replaced, value), value, grad)
    torch.testing.assert_close(found, wanted)


def test_masks_share_a_binding_where_there_are_few():
    q, k, v, replaced, grad = tensors(SHAPES[2])
    bias, seed = torch.randn(1, 3, 33, 33), torch.tensor([3, 5], dtype=torch.int32)

    def run(q, k, v, replaced, grad, bias, seed):
        rest = False, 0.25, seed, 0.3, replaced, False
        output, statistic = torch.ops.webgpu.attention(q, k, v, bias, *rest)
        delta = (grad * output).sum(-1)
        return torch.ops.webgpu.attention_backward(grad, q, k, v, bias, statistic, delta, *rest)

    for most in (8, 12):
        target = Target(max_storage_buffers=most)
        graph = check(run, q, k, v, replaced, grad, bias, seed, target=target)
        for node in graph.nodes:
            if isinstance(node, AttentionGradient):
                assert len(inputs_of(node)) + 1 <= most
