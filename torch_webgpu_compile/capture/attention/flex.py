"""``flex_attention`` and its gradient, the higher-order operators, as operators that are lowered.

`graph.patterns` puts these functions in the place of calls in Dynamo's graph, and AOTAutograd
traces through them. Where the user's functions can be read (`score_mods`) it is
``webgpu::attention``; else it is what PyTorch does on the CPU, with all scores in memory.

Masks are computed from ``mask_mod`` alone, as PyTorch's definition does: kernels find out by
themselves which tiles of keys it leaves out. The lists of blocks beside it are not read.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.attention_ops import AttentionOptions, attend, masked_scores
from ...torch_ops.elementwise import NotElementwise
from ...torch_private import _permute_strides, sdpa_dense
from .operators import is_supported
from .score_mods import Modified, Sizes, mask_of, modified_scores

Results = tuple[Tensor, Tensor, Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Results:
    """``torch.ops.higher_order.flex_attention``.

    Query (batch, heads, queries, size), key and value (batch or 1, key heads, keys, size).

    Returns:
        The result, in the query's order of strides; the logsumexp and the highest score, (batch,
        heads, queries), float32, both in units of log 2.
    """
    arguments = query, key, value, score_mod, block_mask, scale, kernel_options
    batch = query.shape[0]
    k, v = key, value
    if key.shape[0] != batch:  # a view would be saved for the gradients beside its tensor
        k, v = (tensor.expand(batch, *tensor.shape[1:]) for tensor in (key, value))
    if not is_supported(query, k, v, enable_gqa=True):
        return sdpa_dense(*arguments, score_mod_other_buffers, mask_mod_other_buffers)
    sizes: Sizes = (*query.shape[:3], key.shape[2])
    try:
        mask = mask_of(block_mask[-1], mask_mod_other_buffers, sizes, query)
        modified = modified_scores(score_mod, score_mod_other_buffers, sizes, query).kept(mask)
    except NotElementwise:
        return sdpa_dense(*arguments, score_mod_other_buffers, mask_mod_other_buffers)
    return _attention(query, k, v, scale, modified)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, by: Modified) -> Results:
    options = AttentionOptions(
        by.bias,
        False,
        scale * by.factor,
        replaced=by.replaced,
        score_mod="" if by.function is None else by.function.text,
        operands=list(by.operands) or None,
    )
    output, logsumexp = attend(query, key, value, options)
    with torch.no_grad():  # a graph in which nobody reads it does not compute it
        highest = masked_scores(query, key, options).amax(-1)
    if output.stride() != _strides_like(query, output):
        output = _permute_strides(output, query.stride())
    return output, logsumexp / math.log(2), highest / math.log(2)


def _strides_like(query: Tensor, output: Tensor) -> tuple[Any, ...]:
    """The strides that PyTorch's operator gives the result."""
    like = torch.empty(output.shape, dtype=output.dtype, device="meta")
    return _permute_strides(like, query.stride()).stride()
