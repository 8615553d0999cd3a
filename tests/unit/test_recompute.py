"""What is computed again in the backward graph, instead of being kept for it."""

from __future__ import annotations

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.compilations import OPTIONS, TARGET
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.capture.graph.recompute import recompute_constants
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.ir.attention_nodes import AttentionGradient
from torch_webgpu_compile.ir.nodes import Scatter


def attention(q, k, v):
    later = torch.ones(q.shape[2], k.shape[2]).tril() == 0
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores.masked_fill(later, -math.inf), -1) @ v


def graphs_of_training(function, *arguments):
    """The compilations of the forward and the backward graph, which run as they are captured."""
    states = []
    training_graphs(states, function)(*arguments).sum().backward()
    return states


def training_graphs(states, function):
    """``function`` compiled; ``states`` gets the compilation of each graph."""

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
    return torch.compile(function, backend=backend, fullgraph=True)


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


def saved_by(state):
    """The sizes of what a forward graph computes for its backward graph, and shows nobody."""
    saved = {k: o for k, o in enumerate(state.plan.outputs) if o.buffer and o.mutates is None}
    shown = {output.buffer for k, output in saved.items() if k not in state.phase.saved}
    return sorted(tuple(map(int, o.sizes)) for o in saved.values() if o.buffer not in shown)


def test_a_loss_keeps_two_numbers_of_each_row():
    """Not log_softmax, where logits are there anyway; its gradient is one kernel, nearly."""

    def function(x, weight, labels):
        logits = x @ weight
        return logits, torch.nn.functional.cross_entropy(logits, labels)

    labels = torch.tensor([1, -100, 30, 2])
    weight = torch.randn(8, 32, requires_grad=True)
    states = []
    call = training_graphs(states, function)
    call(torch.randn(4, 8), weight, labels)[1].backward()
    forward, backward = states
    assert [sizes for sizes in saved_by(forward) if 32 in sizes] == []
    assert saved_by(forward).count((4, 1)) >= 2
    assert not any(isinstance(node, Scatter) for node in backward.graph.nodes)


def test_an_activation_keeps_its_argument():
    def function(x, weight, other):
        y = x @ weight
        return (y * torch.tanh(0.8 * (y + 0.04 * y.pow(3)))) @ other

    arguments = [torch.randn(6, 8), torch.randn(8, 32, requires_grad=True), torch.randn(32, 2)]
    forward, _ = graphs_of_training(function, *arguments)
    assert saved_by(forward).count((6, 32)) == 1
