"""Rewrites of Dynamo's graph before AOTAutograd traces it.

Each replaces the target of a call by a Python function with the same signature, through which
AOTAutograd traces: attention, also where it is written out in plain operators, and
``torch.lstm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...torch_private import (
    _get_mkldnn_enabled,
    _lstm,
    _native_multi_head_attention,
    _set_mkldnn_enabled,
    _transformer_encoder_layer_fwd,
    scaled_dot_product_attention,
    sdpa_dense_backward,
)
from ..attention import flex, matching, operators

State = tuple[Tensor, Tensor]


def _padded_lstm(
    inputs: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch.lstm`` of a padded batch; source: ATen ``lstm.input``.

    Args:
        inputs: [time, batch, features], or [batch, time, features] when ``batch_first``.
        states: h₀ [layers · directions, batch, projection] and c₀ [layers · directions, batch,
            hidden].
        parameters: per layer and direction: input weight, hidden weight, two biases when
            ``has_biases``, and a projection when the states have different widths.

    Returns:
        The outputs, laid out as ``inputs``, and the final h and c.
    """
    if batch_first:
        inputs = inputs.transpose(0, 1)
    directions = 2 if bidirectional else 1
    count = len(parameters) // (num_layers * directions)
    final: list[State] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            k = layer * directions + direction
            weights = parameters[k * count : (k + 1) * count]
            state = states[0][k], states[1][k]
            output, state = _layer(inputs, state, weights, has_biases, bool(direction))
            outputs.append(output)
            final.append(state)
        inputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            inputs = F.dropout(inputs, dropout, training=True)
    if batch_first:
        inputs = inputs.transpose(0, 1)
    return inputs, torch.stack([h for h, _ in final]), torch.stack([c for _, c in final])


def _layer(
    inputs: Tensor, state: State, weights: Sequence[Tensor], has_biases: bool, reverse: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over all time steps: [time, batch, projection or hidden]."""
    input_weight, hidden_weight = weights[:2]
    input_bias, hidden_bias = weights[2:4] if has_biases else (None, None)
    rest = weights[4:] if has_biases else weights[2:]
    h, c = state
    # One product for all steps; only the hidden part depends on the step before.
    projected = F.linear(inputs, input_weight, input_bias)
    steps = list(projected.unbind(0))
    outputs = []
    for step in reversed(steps) if reverse else steps:
        gates = step + F.linear(h, hidden_weight, hidden_bias)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        if rest:
            h = F.linear(h, rest[0])
        outputs.append(h)
    if reverse:
        outputs.reverse()
    return torch.stack(outputs), (h, c)


def lstm(*arguments: Any) -> Any:
    """``torch.lstm`` in plain operators; packed sequences are traced without oneDNN.

    PyTorch 2.11's own decomposition gives the final states of a layer an extra dimension (it
    squeezes the wrong one), and on CPU tensors oneDNN's fused layer has no decomposition at all.
    """
    if len(arguments) == 9 and isinstance(arguments[1], (tuple, list)):
        return _padded_lstm(*arguments)
    # `torch.backends.mkldnn.flags` also sets unrelated TF32 flags, which warns on CPUs without
    # them.
    enabled = _get_mkldnn_enabled()
    _set_mkldnn_enabled(False)
    try:
        return _lstm(*arguments)
    finally:
        _set_mkldnn_enabled(enabled)


REWRITES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: operators.multi_head_attention_forward,
    F.scaled_dot_product_attention: operators.attention,
    scaled_dot_product_attention: operators.attention,
    torch.ops.aten.scaled_dot_product_attention.default: operators.attention,
    _native_multi_head_attention: operators.multi_head_attention,
    torch.ops.aten._native_multi_head_attention.default: operators.multi_head_attention,
    _transformer_encoder_layer_fwd: operators.transformer_encoder_layer,
    torch.ops.aten._transformer_encoder_layer_fwd.default: operators.transformer_encoder_layer,
    torch.ops.higher_order.flex_attention: flex.flex_attention,
    torch.ops.higher_order.flex_attention_backward: sdpa_dense_backward,  # called by name
    _lstm: lstm,
    torch.lstm: lstm,
}


def _is_nested(node: torch.fx.Node) -> bool:
    """Whether a call is one of nested tensors, whose functions are PyTorch's own."""
    found = (argument.meta.get("example_value") for argument in node.all_input_nodes)
    return any(isinstance(value, Tensor) and value.is_nested for value in found)


def replace_attention(module: torch.fx.GraphModule) -> int:
    """Finds written-out attention in a Dynamo graph and its nested graphs; how many there were."""
    return _each(module, matching.replace_written_attention)


def replace_calls(module: torch.fx.GraphModule) -> int:
    """Applies `REWRITES` in a Dynamo graph and its nested graphs; the number of changes."""
    return _each(module, _replace_calls)


def _replace_calls(graph: torch.fx.Graph) -> int:
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in REWRITES]
    found = [node for node in found if not _is_nested(node)]
    for node in found:
        node.target = REWRITES[node.target]
    return len(found)


def _each(module: torch.fx.GraphModule, rewrite: Callable[[torch.fx.Graph], int]) -> int:
    count = 0
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule) and (found := rewrite(inner.graph)):
            inner.recompile()
            count += found
    return count
