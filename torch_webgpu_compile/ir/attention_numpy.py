"""`Attention` and `AttentionGradient` on NumPy arrays, for `interpret`.

Arrays have the axes of the nodes' ``spaces``, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .attention_nodes import Attention, AttentionGradient

Array = npt.NDArray[Any]


def forward(node: Attention, values: Mapping[str, Any]) -> list[Array]:
    """`Attention` on NumPy by its definition: the softmax of all scores at once.

    The output, and the logsumexp of attention that is not split. ``values`` has arrays, and
    functions of locals, by the node's fields.
    """
    query, key, value, scale = (values[name] for name in ("query", "key", "value", "scale"))
    products = np.matmul(query, np.swapaxes(key, -1, -2)) * scale
    scores, safe = _scores(node, products, values), node.safe
    if "end" in values:
        is_before = np.arange(scores.shape[-1]) < values["end"][..., None]
        scores = np.where(is_before, scores, np.float32(-np.inf))
    if node.parts > 1:
        return [_parts(node.parts, scores, value)]
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
    total = weights.sum(-1, keepdims=True)
    used = weights * values.get("kept", np.float32(1))
    output = np.where(total == 0, 0 if safe else np.nan, np.matmul(used, value) / total)
    if safe:
        return [output, (highest + np.log(total))[..., 0]]
    rest = np.where(total == 0, np.nan, np.log(total))
    return [output, np.stack([highest, rest])[..., 0]]


def gradient(node: AttentionGradient, values: Mapping[str, Any]) -> list[Array]:
    """`AttentionGradient` on NumPy: the gradient of the queries, or those of keys and values."""
    query, gradient, scale = (values[name] for name in ("query", "gradient", "scale"))
    # A key head, and all that is by keys, stands beside each of its query heads.
    key, value = values["key"][:, :, None], values["value"][:, :, None]
    products = np.matmul(query, np.swapaxes(key, -1, -2)) * scale
    scores, logsumexp = _scores(node, products, values), values["logsumexp"]
    if "rest" not in values:
        weights = np.exp(scores - np.where(logsumexp == -np.inf, 0, logsumexp)[..., None])
    else:
        weights = np.exp(scores - logsumexp[..., None] - values["rest"][..., None])
    kept = values.get("kept", np.float32(1))
    grad_weights = np.matmul(gradient, np.swapaxes(value, -1, -2)) * kept
    grad_scores = weights * (grad_weights - values["delta"][..., None])
    if "score_grad" in values:
        grad_scores = values["score_grad"](score=products, gradient=grad_scores)
    if "replaced" in values:
        grad_scores = np.where(values["replaced"], 0, grad_scores)
    if node.of == "queries":
        return [np.matmul(grad_scores, key) * scale]
    grad_key = np.matmul(np.swapaxes(grad_scores, -1, -2), query).sum(2) * scale
    grad_value = np.matmul(np.swapaxes(weights * kept, -1, -2), gradient).sum(2)
    return [grad_key, grad_value]


def _scores(node: Attention | AttentionGradient, scores: Array, values: Mapping[str, Any]) -> Array:
    if "score_mod" in values:
        scores = values["score_mod"](score=scores)
    if "replaced" in values:
        scores = np.where(values["replaced"], np.float32(0), scores)
    scores = scores + values.get("bias", np.float32(0))
    queries, keys = scores.shape[-2:]
    if node.causal:
        scores = np.where(np.tri(queries, keys) != 0, scores, -np.inf)
    if node.window is not None:
        is_near = np.tri(queries, keys, -node.window - 1) == 0
        scores = np.where(is_near, scores, -np.inf)
    return scores


def _parts(parts: int, scores: Array, v: Array) -> Array:
    """The partial results of split `Attention`, of all scores and values."""
    per, wide = -(-scores.shape[-1] // parts), -(-v.shape[-1] // 4) * 4
    out = np.zeros((parts, *scores.shape[:-1], wide + 4), np.float32)
    out[..., wide] = -np.inf
    for part in range(parts):
        own = scores[..., part * per : (part + 1) * per]
        if not own.shape[-1]:
            continue
        highest = own.max(-1, keepdims=True)
        weights = np.exp(own - np.where(highest == -np.inf, 0, highest))
        out[part, ..., : v.shape[-1]] = np.matmul(weights, v[..., part * per : (part + 1) * per, :])
        out[part, ..., wide], out[part, ..., wide + 1] = highest[..., 0], weights.sum(-1)
    return out
