"""Decompositions of operators that PyTorch dispatches to out-of-tree devices.

Some exist for such devices only (``…_overrideable``), others are fused kernels that a device is
expected to have. Each takes the arguments of its ATen schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import attention_ops, custom_ops
from ...torch_ops.attention_ops import AttentionOptions
from ...torch_private import OpOverload
from ..attention import operators
from ..decompositions import random

aten = torch.ops.aten


def convolution_backward(grad: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> Any:
    """``convolution_backward_overrideable``; the last argument says which gradients are wanted."""
    bias_sizes = [grad.shape[1]] if rest[-1][2] else None
    return aten.convolution_backward.default(grad, input, weight, bias_sizes, *rest)


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


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution_overrideable.default: aten.convolution.default,
    aten.convolution_backward_overrideable.default: convolution_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: attention_backward,
    aten._native_multi_head_attention.default: operators.multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: operators.transformer_encoder_layer,
    custom_ops.self_attention: operators.self_attention,
}
