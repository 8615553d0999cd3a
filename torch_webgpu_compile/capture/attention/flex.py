"""``flex_attention`` and its gradient, the higher-order operators, in operators that can be lowered.

`graph.patterns` puts these functions in the place of calls in Dynamo's graph, and AOTAutograd
traces through them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._higher_order_ops.flex_attention import sdpa_dense, sdpa_dense_backward


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
) -> tuple[Any, ...]:
    """``torch.ops.higher_order.flex_attention``."""
    return sdpa_dense(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        kernel_options,
        score_mod_other_buffers,
        mask_mod_other_buffers,
    )


def flex_attention_backward(*arguments: Any) -> Any:
    return sdpa_dense_backward(*arguments)
