"""What depends on no argument is computed again in the backward graph."""

from __future__ import annotations

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compilations import OPTIONS, TARGET
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.capture.graph.recompute import recompute_constants
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.ir.attention_nodes import AttentionGradient


def attention(q, k, v):
    later = torch.ones(q.shape[2], k.shape[2]).tril() == 0
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v


def graphs_of_training(function, *arguments):
    """The compilations of the forward and the backward graph, which run as they are captured."""
    states = []

    def backend(module, inputs):
        def compile_captured(captured, phase):
            states.append(compile_graph(captured, phase, TARGET, OPTIONS, use_cache=False))

            def run(values):
                taken = list(values)
                values.clear()
                results = list(captured.module(*taken))
                for output, argument in phase.forwarded:
                    results[output] = taken[argument]
                return results

            return run

        return aot.capture(module, inputs, compile_captured, native_operators())

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*arguments).sum().backward()
    return states


def test_a_written_mask_is_causal_in_the_gradient():
    arguments = [torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3)]
    _, backward = graphs_of_training(attention, *arguments)
    nodes = [node for node in backward.graph.nodes if isinstance(node, AttentionGradient)]
    assert [node.of for node in nodes] == ["queries", "keys"]
    groups = [getattr(group, "node", None) for group in backward.schedule.groups]
    kept = [node for node in groups if isinstance(node, AttentionGradient)]
    assert all(node.causal and node.bias is None and node.replaced is None for node in kept)
    assert len(kept) == 2


def test_what_is_marked():
    def function(x):
        table = torch.arange(4).float().exp()
        noise = torch.rand(4)
        return x * table + noise

    graph = make_fx(function, tracing_mode="fake")(torch.randn(4))
    recompute_constants(graph)
    marked = {n.target for n in graph.graph.nodes if "recompute" in n.meta}
    aten = torch.ops.aten
    assert {aten.arange.default, aten.exp.default} <= marked
    assert not marked & {aten.rand.default, aten.mul.Tensor, aten.add.Tensor}
