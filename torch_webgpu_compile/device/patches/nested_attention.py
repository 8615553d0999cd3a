"""Attention of nested (jagged) tensors: padded, with a mask of the keys that there are.

Patched: ``jagged_scaled_dot_product_attention`` in ``torch.nested._internal.ops``.

Why: PyTorch has kernels of jagged attention for CUDA, and for all other devices a path through
nested tensors of the strided layout, which webgpu does not have, which cannot be causal, and which
no graph of CPU tensors holds.

Until: PyTorch asks a PrivateUse1 device for a kernel of jagged attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tensors import devices
from ..import_hooks import around


@around("torch.nested._internal.ops:jagged_scaled_dot_product_attention")
def jagged_scaled_dot_product_attention(
    original: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    given = (query, key, value)
    is_ours = query.device.type == devices.NAME or _is_compiled_for_webgpu()
    is_ours = is_ours and attn_mask is None
    if is_ours and all(t.is_nested and t.dim() == 4 and t._ragged_idx == 2 for t in given):
        return attention(*given, dropout_p, is_causal, scale, enable_gqa)
    return original(*given, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_traced() -> bool:
    """Whether Dynamo or AOTAutograd runs this, on fake tensors."""
    return torch._guards.TracingContext.try_get() is not None


def _is_compiled_for_webgpu() -> bool:
    """Whether a function is being compiled with this package's backend, on whatever tensors."""
    if not _is_traced():
        return False
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # something else compiles
        return False
    chosen = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    return getattr(chosen, "compiler_name", None) == devices.NAME


def attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """``scaled_dot_product_attention`` of nested tensors (batch, heads, ragged, head size).

    Rows are as long as the longest, or, while that is not known in a graph, as all together. In a
    causal one a row's first query has its first key.
    """
    query, key, value = (  # without holes
        t if t.lengths() is None else t.contiguous() for t in (query, key, value)
    )
    queries, keys, values = map(_padded, (query, key, value))
    places = torch.arange(keys.shape[2], device=query.device)
    mask = (places < key.offsets().diff().unsqueeze(1))[:, None, None]
    if is_causal:
        rows = torch.arange(queries.shape[2], device=query.device)
        mask = mask & (places <= rows.unsqueeze(1))
    dense: Callable[..., Tensor] = F.scaled_dot_product_attention
    if _is_traced():
        from ...capture.attention.operators import attention as dense
    result = dense(
        *(queries, keys, values, mask), dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    from_padded: Any = torch.nested._internal.nested_tensor.nested_from_padded
    made = from_padded(
        result.transpose(1, 2),
        query.offsets(),
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
        sum_S=query._values.shape[query._ragged_idx - 1],
    )
    return made.transpose(1, 2)


def _padded(nested: Any) -> Tensor:
    """(batch, heads, length, head size)."""
    if not _is_traced():
        nested._get_max_seqlen()  # which it knows from then on
    # PyTorch's gradient of a padded tensor that is ragged elsewhere has a wrong size.
    padded: Tensor = nested.transpose(1, 2).to_padded_tensor(0.0)
    return padded.transpose(1, 2)
