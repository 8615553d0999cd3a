"""Decompositions of operators that PyTorch calls on a device outside of its own tree.

Some exist for such devices only (``…_overrideable``), others are fused kernels that a device is
expected to have. Each takes the arguments of its ATen schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...torch_ops import attention as attention_ops
from ...torch_ops import custom_ops
from ...torch_ops.attention import AttentionOptions
from ..attention import operators
from ..decompositions import random

aten = torch.ops.aten

Size = Sequence[int | torch.SymInt]


def convolution(*arguments: Any) -> Tensor:
    """``convolution_overrideable``."""
    result: Tensor = aten.convolution.default(*arguments)
    return result


def convolution_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Size,
    padding: Size,
    dilation: Size,
    transposed: bool,
    output_padding: Size,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """``convolution_backward_overrideable``."""
    bias_sizes = [grad.shape[1]] if output_mask[2] else None
    geometry = stride, padding, dilation, transposed, output_padding, groups
    return aten.convolution_backward.default(
        grad, input, weight, bias_sizes, *geometry, output_mask
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``_scaled_dot_product_fused_attention_overrideable``.

    The seed of dropout, int32 (2,), is what PyTorch calls the Philox seed.
    """
    seed = random.seed() if dropout_p > 0.0 else None
    bias = operators.additive(attn_bias, query.dtype)
    has_kernel = operators.is_supported(query, key, value, enable_gqa=True)
    attend = attention_ops.attend if has_kernel else attention_ops.plain_attention
    options = AttentionOptions(bias, is_causal, _scale(query, scale), seed, dropout_p)
    output, logsumexp = attend(query, key, value, options)
    lengths = query.shape[-2], key.shape[-2]
    return output, logsumexp, None, None, *lengths, seed, None, None


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: Sequence[bool],
    out: Tensor,
    logsumexp: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """``_scaled_dot_product_fused_attention_overrideable_backward``."""
    assert logsumexp is not None
    seed = philox_seed if dropout_p > 0.0 else None
    options = AttentionOptions(attn_bias, is_causal, _scale(query, scale), seed, dropout_p)
    results = out, logsumexp
    plain = not operators.is_supported(query, key, value, enable_gqa=True)
    return attention_ops.attention_gradients(
        grad, query, key, value, options, *results, grad_input_mask, plain
    )


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _opmath(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _gates(gates: Tensor, *biases: Tensor | None) -> Tensor:
    total = _opmath(gates)
    for bias in biases:
        if bias is not None:
            total = total + _opmath(bias)
    return total


def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``_thnn_fused_lstm_cell``: h, c and the activated gates (batch, 4 · hidden)."""
    gates = _gates(input_gates, input_bias) + _gates(hidden_gates, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _opmath(cx) + i * g
    results = o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)
    h, c, workspace = (result.to(cx.dtype) for result in results)
    return h, c, workspace


def lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> Any:
    """``_thnn_fused_lstm_cell_backward_impl``: the gradients by gates, c and bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = _opmath(workspace).chunk(4, 1)
    grad_h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = torch.zeros_like(cy) if grad_cy is None else grad_cy
    t = _opmath(cy).tanh()
    through = _opmath(grad_h) * o * (1 - t * t) + _opmath(grad_c)
    grad_gates = torch.cat(
        [
            through * g * i * (1 - i),
            through * _opmath(cx) * f * (1 - f),
            through * i * (1 - g * g),
            _opmath(grad_h) * t * o * (1 - o),
        ],
        1,
    )
    dtype = workspace.dtype
    grad_bias = grad_gates.sum(0).to(dtype) if has_bias else None
    return grad_gates.to(dtype), (through * f).to(dtype), grad_bias


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``_thnn_fused_gru_cell``: h, and what its backward needs (batch, 5 · hidden)."""
    ir, iz, in_ = _gates(input_gates, input_bias).chunk(3, 1)
    hr, hz, hn = _gates(hidden_gates, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (in_ + r * hn).tanh()
    h = _opmath(hx)
    workspace = torch.cat([r, z, n, h, hn], 1)
    return (n + z * (h - n)).to(hx.dtype), workspace.to(hx.dtype)


def gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    """``_thnn_fused_gru_cell_backward``: by input gates, hidden gates, h and the two biases."""
    r, z, n, h, hn = _opmath(workspace).chunk(5, 1)
    grad = _opmath(grad_hy)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_z = grad * (h - n) * (1 - z) * z
    grad_r = grad_n * hn * (1 - r) * r
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    results = grad_input, grad_hidden, grad * z, *biases
    return tuple(None if x is None else x.to(workspace.dtype) for x in results)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution_overrideable.default: convolution,
    aten.convolution_backward_overrideable.default: convolution_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: attention_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._native_multi_head_attention.default: operators.multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: operators.transformer_encoder_layer,
    custom_ops.self_attention: operators.self_attention,
}
