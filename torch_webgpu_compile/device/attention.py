"""Scaled dot-product attention on the device, as one operator with a gradient of its own.

PyTorch takes the fused operator of a device only where C++ tells it to, and else breaks attention
up into products and a softmax of all scores. So the choice is made here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..capture.attention import operators

aten = torch.ops.aten


def scaled_dot_product_attention(
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
    """`torch.nn.functional.scaled_dot_product_attention`, for all keys of the device.

    The fused operator has no second derivative. Who needs one asks for PyTorch's plain attention,
    as with every fused attention: ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``.
    """
    supported = query.dim() == 4 and operators.is_supported(query, key, value, enable_gqa)
    wanted = torch._C._get_overrideable_sdp_enabled()
    if not (supported and wanted) or (is_causal and attn_mask is not None):
        rest = attn_mask, dropout_p, is_causal, None
        plain: Tensor = aten._scaled_dot_product_attention_math.default(
            query, key, value, *rest, scale=scale, enable_gqa=enable_gqa
        )[0]
        return plain
    bias = operators.additive(attn_mask, query.dtype)
    fused: Tensor = aten._scaled_dot_product_fused_attention_overrideable.default(
        query, key, value, bias, dropout_p, is_causal, False, scale=scale
    )[0]
    return fused
