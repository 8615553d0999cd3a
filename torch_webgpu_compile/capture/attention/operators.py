"""PyTorch's attention operators in terms of ``webgpu::attention``, where that covers the case.

`graph.patterns` puts these functions in the place of calls in Dynamo's graph, and AOTAutograd
traces through them, so they may look at shapes and dtypes and call whatever lowers best. The
CPU-only fused operators of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` become
compositions of ordinary operators.
"""

from __future__ import annotations

import math
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...torch_ops.attention_ops import AttentionOptions, attend, safe_softmax
from ..decompositions import random

aten = torch.ops.aten

MAX_HEAD_SIZE = 256
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, as ``webgpu::attention`` where supported."""
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    bias = additive(attn_mask, query.dtype)
    if not is_supported(query, key, value, enable_gqa):
        plain: Tensor = aten._scaled_dot_product_attention_math.default(
            *(query, key, value, bias, dropout_p, is_causal),
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
        return plain
    seed = random.seed() if dropout_p > 0.0 else None
    if bias is not None and bias.dim() == query.dim() == 3:
        bias = bias.unsqueeze(1)
    options = AttentionOptions(bias, is_causal, scale, seed, dropout_p)
    if query.dim() == 4:
        return attend(query, key, value, options)[0]
    q, k, v = (tensor.unsqueeze(1) for tensor in (query, key, value))
    return attend(q, k, v, options)[0].squeeze(1)


def is_supported(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether ``webgpu::attention`` has kernels for these dtypes and sizes."""
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return False
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        return False
    if query.shape[-1] > MAX_HEAD_SIZE or value.shape[-1] > MAX_HEAD_SIZE:
        return False
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if query.dim() == 4 and query.shape[1] != key.shape[1]:
        return enable_gqa and query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    return query.dim() == 3 or key.shape[1] == value.shape[1]


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask (True keeps) as a bias of 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, float("-inf")).to(dtype)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``torch._native_multi_head_attention``; of the same tensor thrice, in one product."""
    batch, length, _ = query.shape
    size = embed_dim // num_head
    if query is key and key is value:
        packed = F.linear(query, qkv_weight, qkv_bias).view(batch, length, 3, num_head, size)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        parts = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
        q, k, v = (
            F.linear(x, weight, bias).view(*x.shape[:2], num_head, size).transpose(1, 2)
            for x, weight, bias in parts
        )
    bias = _encoder_bias(mask, mask_type, query.dtype)
    if need_weights:
        scores = torch.matmul(q / math.sqrt(size), k.transpose(-2, -1))
        weights = safe_softmax(scores if bias is None else scores + bias)
        context = torch.matmul(weights, v)
    else:
        weights = None
        context = attention(q, k, v, bias)
    joined = context.transpose(1, 2).reshape(batch, length, embed_dim)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return F.linear(joined, proj_weight, proj_bias), weights


def _encoder_bias(mask: Tensor | None, mask_type: int | None, dtype: torch.dtype) -> Tensor | None:
    """The fused operators' mask (True or -inf removes) as a bias of four dimensions.

    ``mask_type``: 0 (queries, keys), 1 (batch, keys), 2 (batch, heads, queries, keys).
    """
    if mask is None:
        return None
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.where(mask, float("-inf"), 0.0).to(dtype)
    return bias[:, None, None, :] if mask_type == 1 else bias


def self_attention(query: Tensor, *arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
    """``webgpu::self_attention``: `multi_head_attention` of one tensor."""
    return multi_head_attention(query, query, query, *arguments, **keywords)


def transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``torch._transformer_encoder_layer_fwd``: the whole layer, evaluation mode."""

    projections = qkv_weight, qkv_bias, proj_weight, proj_bias

    def attended(x: Tensor) -> Tensor:
        rest = mask, False, True, mask_type
        return self_attention(x, embed_dim, num_heads, *projections, *rest)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    norm = partial(F.layer_norm, normalized_shape=(embed_dim,), eps=eps)
    norm_1 = partial(norm, weight=norm_weight_1, bias=norm_bias_1)
    norm_2 = partial(norm, weight=norm_weight_2, bias=norm_bias_2)
    if norm_first:
        x = src + attended(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attended(src))
    return norm_2(x + feed_forward(x))


def _with_globals(function: Any, **replaced: Any) -> FunctionType:
    """A copy of a Python function that finds other objects under some global names."""
    scope = {**function.__globals__, **replaced}
    copy = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__ = __name__  # FX writes calls of torch's own functions by name, not by object
    return copy


# Dynamo keeps calls of this Python function whole; the attention that it calls is inside.
# AOTAutograd traces under a torch-function mode, which would hand the call back to the original.
multi_head_attention_forward = _with_globals(
    F.multi_head_attention_forward,
    scaled_dot_product_attention=attention,
    has_torch_function=lambda _: False,
)
