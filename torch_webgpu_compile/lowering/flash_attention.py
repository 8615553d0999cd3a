"""PyTorch's fused CPU attention, which training graphs hold as one node.

Source: ATen ``_scaled_dot_product_flash_attention_for_cpu`` and its ``_backward``. Shapes: query
[B, H, L, E], key [B, H, S, E], value [B, H, S, Ev], logsumexp [B, H, L] in float32.
"""

from __future__ import annotations

import math

import torch

from .. import dtypes
from ..dtypes import Kind
from ..ir.scalar import apply, cast, const
from ..torch_ops.attention import AttentionOptions
from .attention import lower_attention, lower_attention_backward
from .builder import Builder
from .reductions import Reducing
from .registry import NotLowered, lowers
from .value import Value

aten = torch.ops.aten
F32 = dtypes.float32


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def lower_flash_attention(
    builder: Builder,
    query: Value,
    key: Value,
    value: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value | None, Value | None]:
    """(result, logsumexp) of scaled dot-product attention; see `lower_attention`.

    The scale is 1 / √size unless given. A bool mask keeps what is True. Raises NotLowered: for
    dropout, for a symbolic head size without a scale, and where `lower_attention` does.
    """
    if dropout_p:
        raise NotLowered("attention with dropout")
    options = AttentionOptions(_bias(attn_mask), is_causal, _scale(query, scale))
    return lower_attention(builder, query, key, value, options)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def lower_flash_attention_backward(
    builder: Builder,
    grad_out: Value,
    query: Value,
    key: Value,
    value: Value,
    out: Value,
    logsumexp: Value,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value | None, Value | None, Value | None]:
    """The gradients of query, key and value; see `lower_attention_backward`.

    Raises NotLowered: for dropout, for a symbolic head size without a scale, and where
    `lower_attention_backward` does.
    """
    if dropout_p:
        raise NotLowered("attention with dropout")
    split = Reducing(grad_out, [3])
    terms = apply("mul", cast(split.body(), F32), cast(split.body(out), F32))
    delta = split.reduce(builder, "sum", terms, keepdim=False, name="delta")
    options = AttentionOptions(_bias(attn_mask), is_causal, _scale(query, scale))
    inputs = grad_out, query, key, value, options, logsumexp, delta
    return lower_attention_backward(builder, *inputs)


def _bias(mask: Value | None) -> Value | None:
    """A mask as a bias of scores: True keeps."""
    if mask is None or mask.dtype.kind is not Kind.BOOL:
        return mask
    body = apply("where", mask.body, const(0.0, F32), const(float("-inf"), F32))
    return Value(F32, mask.sizes, body)


def _scale(query: Value, scale: float | None) -> float:
    size = query.sizes[-1]
    if scale is not None:
        return scale
    if not size.is_constant:
        raise NotLowered("attention of a symbolic head size")
    return 1 / math.sqrt(size.constant)
