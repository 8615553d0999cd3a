"""Lowered attention, interpreted, against the operator itself."""

from __future__ import annotations

import pytest
import torch

from tests.harness import check
from torch_webgpu_compile.ir.nodes import Attention
from torch_webgpu_compile.lowering import attention  # noqa: F401

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
