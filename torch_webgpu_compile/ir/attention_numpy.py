"""`Attention` and `AttentionGradient` on NumPy arrays, for `interpret`.

Arrays have the axes of the nodes' ``spaces``, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .attention_nodes import Attention, AttentionGradient

Array = npt.NDArray[Any]
Function = Callable[..., Array]


def forward(
    node: Attention,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    kept: Array | None = None,
    replaced: Array | None = None,
    end: Array | None = None,
    score_mod: Function | None = None,
    *,
    scale: Array,
) -> list[Array]:
    """`Attention` on NumPy by its definition: the softmax of all scores at once.

    The output, and the logsumexp of attention that is not split.
    """
    products = _products(query, key, scale)
    scores, safe = _scores(node, products, bias, replaced, score_mod), node.safe
    if end is not None:
        is_before = np.arange(scores.shape[-1]) < end[..., None]
        scores = np.where(is_before, scores, np.float32(-np.inf))
    if node.parts > 1:
        return [_parts(node.parts, scores, value)]
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
    total = weights.sum(-1, keepdims=True)
    used = weights if kept is None else weights * kept
    output = np.where(total == 0, 0 if safe else np.nan, np.matmul(used, value) / total)
    if safe:
        return [output, (highest + np.log(total))[..., 0]]
    rest = np.where(total == 0, np.nan, np.log(total))
    return [output, np.stack([highest, rest])[..., 0]]


def gradient(
    node: AttentionGradient,
    query: Array,
    key: Array,
    value: Array,
    gradient: Array,
    logsumexp: Array,
    delta: Array,
    bias: Array | None = None,
    kept: Array | None = None,
    replaced: Array | None = None,
    rest: Array | None = None,
    score_mod: Function | None = None,
    score_grad: Function | None = None,
    *,
    scale: Array,
) -> list[Array]:
    """`AttentionGradient` on NumPy: the gradient of the queries, or those of keys and values."""
    # A key head, and all that is by keys, stands beside each of its query heads.
    shared, values = key[:, :, None], value[:, :, None]
    products = _products(query, shared, scale)
    scores = _scores(node, products, bias, replaced, score_mod)
    if rest is None:
        weights = np.exp(scores - np.where(logsumexp == -np.inf, 0, logsumexp)[..., None])
    else:
        weights = np.exp(scores - logsumexp[..., None] - rest[..., None])
    grad_weights = np.matmul(gradient, np.swapaxes(values, -1, -2))
    used = weights
    if kept is not None:
        used, grad_weights = weights * kept, grad_weights * kept
    grad_scores = weights * (grad_weights - delta[..., None])
    if score_grad is not None:
        grad_scores = score_grad(score=products, gradient=grad_scores)
    if replaced is not None:
        grad_scores = np.where(replaced, 0, grad_scores)
    if node.of == "queries":
        grad_query: Array = np.matmul(grad_scores, shared) * scale
        return [grad_query]
    grad_key = np.matmul(np.swapaxes(grad_scores, -1, -2), query).sum(2) * scale
    grad_value = np.matmul(np.swapaxes(used, -1, -2), gradient).sum(2)
    return [grad_key, grad_value]


def _products(query: Array, key: Array, scale: Array) -> Array:
    products: Array = np.matmul(query, np.swapaxes(key, -1, -2)) * scale
    return products


def _scores(
    node: Attention | AttentionGradient,
    scores: Array,
    bias: Array | None,
    replaced: Array | None,
    score_mod: Function | None,
) -> Array:
    if score_mod is not None:
        scores = score_mod(score=scores)
    if replaced is not None:
        scores = np.where(replaced, np.float32(0), scores)
    if bias is not None:
        scores = scores + bias
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
