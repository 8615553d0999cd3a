"""Lowered attention, interpreted, against the operator itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compilations import compile_function
from tests.harness import capture, check, lower_checked
from torch_webgpu_compile.errors import VerificationError
from torch_webgpu_compile.ir.attention_nodes import Attention, AttentionGradient
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.lowering import lower_attention  # noqa: F401
from torch_webgpu_compile.target import Target

CASES = [
    # query shape, key shape, value size, bias shape, causal
    ((2, 4, 5, 8), (2, 4, 7, 8), 8, None, False),
    ((2, 4, 7, 8), (2, 4, 7, 8), 6, None, True),
    ((2, 4, 5, 8), (2, 2, 7, 8), 8, (2, 1, 1, 7), False),
    ((1, 6, 5, 8), (1, 2, 7, 8), 8, (5, 7), True),
    ((2, 3, 1, 8), (2, 1, 7, 8), 8, (2, 3, 1, 7), False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_lowered_attention(case, dtype):
    query_shape, key_shape, value_size, bias_shape, causal = case
    torch.manual_seed(0)
    q = torch.randn(query_shape, dtype=dtype)
    k = torch.randn(key_shape, dtype=dtype)
    v = torch.randn((*key_shape[:3], value_size), dtype=dtype)
    bias = [] if bias_shape is None else [torch.randn(bias_shape, dtype=dtype)]

    def run(q, k, v, *bias):
        return torch.ops.webgpu.attention(q, k, v, bias[0] if bias else None, causal, 0.25)[0] + 1

    tolerance = {} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    graph = check(run, q, k, v, *bias, **tolerance)
    assert sum(isinstance(node, Attention) for node in graph.nodes) == 1


def test_dynamic_sizes():
    q = torch.randn(2, 4, 6, 8)

    def run(q):
        return torch.ops.webgpu.attention(q, q, q, None, True, 0.25)[0]

    check(run, q, dynamic=True)


def test_no_keys():
    def run(q, k):
        return torch.ops.webgpu.attention(q, k, k, None, False, 0.25)[0]

    graph = check(run, torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4))
    assert not any(isinstance(node, Attention) for node in graph.nodes)


def tensors(case, dtype=torch.float32):
    """query, key, value and bias or None."""
    query_shape, key_shape, value_size, bias_shape, _ = case
    torch.manual_seed(0)
    q = torch.randn(query_shape, dtype=dtype)
    k = torch.randn(key_shape, dtype=dtype)
    v = torch.randn((*key_shape[:3], value_size), dtype=dtype)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=dtype)
    if bias is not None and bias.shape[-2] > 1:
        bias[..., 1, :] = float("-inf")  # a row without keys
    return q, k, v, bias


SEED = torch.tensor([3, 5], dtype=torch.int32)


def both(causal, dropout):
    """Attention's two results and the gradients of query, key and value, by the operators."""

    def run(q, k, v, grad, *others):
        seed, bias = others[0] if dropout else None, others[1] if len(others) > 1 else None
        bias = others[0] if not dropout and others else bias
        rest = causal, 0.25, seed, dropout
        output, logsumexp = torch.ops.webgpu.attention(q, k, v, bias, *rest)
        delta = (grad.float() * output.float()).sum(-1)
        inputs = grad, q, k, v, bias, logsumexp, delta
        return output, logsumexp, *torch.ops.webgpu.attention_backward(*inputs, *rest)

    return run


@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_lowered_gradients_and_dropout(case, dtype, dropout):
    q, k, v, bias = tensors(case, dtype)
    grad = torch.randn(*q.shape[:3], v.shape[3], dtype=dtype)
    others = ([SEED] if dropout else []) + ([] if bias is None else [bias])
    tolerance = {} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    graph = check(both(case[4], dropout), q, k, v, grad, *others, **tolerance)
    nodes = [node for node in graph.nodes if isinstance(node, Attention | AttentionGradient)]
    assert [getattr(node, "of", "") for node in nodes] == ["", "queries", "keys"]
    scores = [q.shape[2], k.shape[2]]
    made = [b for name, b in graph.buffers.items() if not name.startswith("in")]
    assert all(list(map(int, buffer.sizes[-2:])) != scores for buffer in made)


def test_lowered_gradients_of_dynamic_sizes():
    def run(q, grad):
        return both(True, 0.0)(q, q, q, grad)

    check(run, torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), dynamic=True)


def test_only_gradients_that_are_read():
    q, k, v, _ = tensors(CASES[0])

    def run(q, k, v, grad):
        return both(False, 0.0)(q, k, v, grad)[2]

    graph = check(run, q, k, v, torch.randn(2, 4, 5, 8))
    assert [n.of for n in graph.nodes if isinstance(n, AttentionGradient)] == ["queries"]


@pytest.mark.parametrize("empty", ["queries", "keys"])
def test_gradients_of_nothing(empty):
    q = torch.randn(1, 2, 0 if empty == "queries" else 3, 4)
    k = torch.randn(1, 2, 0 if empty == "keys" else 5, 4)
    graph = check(both(False, 0.0), q, k, k, torch.randn(1, 2, q.shape[2], 4))
    assert not any(isinstance(node, AttentionGradient) for node in graph.nodes)


def test_statistics_share_a_binding_where_there_are_few():
    q, k, v, bias = tensors(CASES[3])
    arguments = q, k, v, torch.randn(1, 6, 5, 8), SEED, bias
    for most, given, bound in ((8, arguments[:5], 8), (10, arguments, 10)):
        target = Target(max_storage_buffers=most)
        plan = compile_function(both(True, 0.3), *given, target=target).plan
        counts = [len(k.bindings) for k in plan.kernels if "attention_backward" in k.name]
        assert max(counts) == bound
    check(both(True, 0.3), *arguments)


def test_wrong_nodes_are_found():
    q, k, v, _ = tensors(CASES[0])
    graph = lower_checked(capture(both(False, 0.0), q, k, v, torch.randn(2, 4, 5, 8)))
    for position, node in enumerate(graph.nodes):
        if not isinstance(node, Attention | AttentionGradient):
            continue
        wrong = [replace(node, query=node.key), replace(node, bias=node.value)]
        if isinstance(node, Attention):
            wrong += [replace(node, logsumexp=graph.inputs[0].buffer), replace(node, parts=2)]
        else:
            wrong += [replace(node, of="keys" if node.of == "queries" else "queries")]
        for other in wrong:
            nodes = (*graph.nodes[:position], other, *graph.nodes[position + 1 :])
            with pytest.raises(VerificationError):
                verify_loop_graph(replace(graph, nodes=nodes))
