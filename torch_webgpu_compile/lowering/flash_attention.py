"""PyTorch's fused CPU attention, which training graphs hold as one node.

Source: ATen ``_scaled_dot_product_flash_attention_for_cpu`` and its ``_backward``. Shapes: query
[B, H, L, E], key [B, H, S, E], value [B, H, S, Ev], logsumexp [B, H, L] in float32.
"""

from __future__ import annotations

import math

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..sizes import ONE, Expr
from .builder import Builder
from .matmul import matmul
from .promotion import compute_dtype
from .reductions import Reducing, summed
from .registry import NotLowered, lowers
from .value import Value, expand, permute, positions, reshape, view

aten = torch.ops.aten


def _repeated(value: Value, heads: Expr) -> Value:
    """Key or value heads, each repeated for its group of query heads."""
    if value.sizes[1] is heads:
        return value
    batch, own, *rest = value.sizes
    group = heads // own
    sizes = (batch, heads, *rest)
    b, head, *others = positions(sizes)
    return view(value, sizes, [b, head // group, *others])


def _grouped(builder: Builder, grad: Value, heads: Expr) -> Value:
    """The gradient of repeated heads: the sum over each group."""
    if grad.sizes[1] is heads:
        return grad
    batch, repeated, *rest = grad.sizes
    parts = reshape(grad, [batch, heads, repeated // heads, *rest])
    return summed(builder, parts, [2], grad.dtype)


def _transposed(value: Value) -> Value:
    return permute(value, [0, 1, 3, 2])


def _scores(
    builder: Builder,
    query: Value,
    key: Value,
    mask: Value | None,
    is_causal: bool,
    scale: float | None,
) -> Value:
    """scale · query · keyᵀ + mask, -inf where masked, in the compute dtype."""
    dtype = compute_dtype(query.dtype)
    factor = _scale(query, scale, dtype)
    product = matmul(builder, query, _transposed(key), dtype)
    body = apply("mul", product.body, factor)
    row, column = positions(product.sizes)[-2:]
    lowest = const(float("-inf"), dtype)
    if mask is not None:
        added = expand(mask, product.sizes).body
        if mask.dtype.kind is Kind.BOOL:
            body = apply("where", added, body, lowest)
        else:
            body = apply("add", body, cast(added, dtype))
    if is_causal:
        body = apply("where", apply("le", Index(column), Index(row)), body, lowest)
    return builder.pointwise(body, product.sizes, name="scores")


def _scale(query: Value, scale: float | None, dtype: DType) -> Scalar:
    if scale is not None:
        return const(scale, dtype)
    size = query.sizes[-1]
    if size.is_constant:
        return const(1 / math.sqrt(size.constant), dtype)
    return apply("rsqrt", cast(Index(size), dtype))


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
) -> tuple[Value, Value]:
    """(output, logsumexp)"""
    if dropout_p:
        raise NotLowered("attention with dropout")
    heads = query.sizes[1]
    key, value = _repeated(key, heads), _repeated(value, heads)
    scores = _scores(builder, query, key, attn_mask, is_causal, scale)
    split = Reducing(scores, [3])
    largest = split.reduce(builder, "maximum", split.body(), keepdim=True, name="max")
    shifted = apply("sub", scores.body, expand(largest, scores.sizes).body)
    grown = builder.pointwise(apply("exp", shifted), scores.sizes, name="exp")
    total = split.reduce(builder, "sum", split.body(grown), keepdim=True, name="sum")
    weights = apply("div", grown.body, expand(total, scores.sizes).body)
    weights_value = builder.pointwise(weights, scores.sizes, name="weights")
    out = matmul(builder, weights_value, value, builder.out.dtype)
    logarithm = apply("add", largest.body, apply("log", total.body))
    logsumexp = builder.pointwise(cast(logarithm, dtypes.float32), largest.sizes, name="lse")
    return out, reshape(logsumexp, split.sizes)


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
) -> tuple[Value, Value, Value]:
    """Gradients of query, key and value, with P = exp(scores − logsumexp) computed again.

    dV = Pᵀ·dO, dS = P·(dO·Vᵀ − rowsum(dO·O)), dQ = scale·dS·K, dK = scale·dSᵀ·Q.
    """
    if dropout_p:
        raise NotLowered("attention with dropout")
    dtype = compute_dtype(query.dtype)
    own_heads, heads = key.sizes[1], query.sizes[1]
    key, value = _repeated(key, heads), _repeated(value, heads)
    scores = _scores(builder, query, key, attn_mask, is_causal, scale)
    lse = expand(reshape(logsumexp, [*logsumexp.sizes, ONE]), scores.sizes)
    weights = apply("exp", apply("sub", scores.body, cast(lse.body, dtype)))
    weights_value = builder.pointwise(weights, scores.sizes, name="weights")
    split = Reducing(grad_out, [3])
    row_product = apply("mul", cast(split.body(), dtype), cast(split.body(out), dtype))
    delta = split.reduce(builder, "sum", row_product, keepdim=True, name="delta")
    grad_weights = matmul(builder, grad_out, _transposed(value), dtype)
    centered = apply("sub", grad_weights.body, expand(delta, scores.sizes).body)
    grad = apply("mul", apply("mul", weights_value.body, centered), _scale(query, scale, dtype))
    grad_scores = builder.pointwise(grad, scores.sizes, name="grad_scores")
    grad_query = matmul(builder, grad_scores, key, query.dtype)
    grad_key = matmul(builder, _transposed(grad_scores), query, key.dtype)
    grad_value = matmul(builder, _transposed(weights_value), grad_out, value.dtype)
    return (
        grad_query,
        _grouped(builder, grad_key, own_heads),
        _grouped(builder, grad_value, own_heads),
    )
