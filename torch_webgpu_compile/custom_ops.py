"""Operators that this package adds to PyTorch, for capture to use and lowering to know.

``webgpu::attention`` is scaled dot-product attention. PyTorch's own operator decomposes into a
dozen others while a graph is traced; this one does not, and its gradient is written in plain ATen
operators. ``webgpu::seed`` and ``webgpu::uniform`` are random numbers that a kernel can compute:
``uniform`` is a pure function of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal, float scale) -> Tensor"
)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Scaled and biased scores, (batch, key heads, group, queries, keys)."""
    batch, heads, queries, size = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], queries, size)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-2, -1)) * scale
    if bias is not None:
        full = bias.expand(batch, heads, queries, key.shape[2])
        scores = scores + full.reshape(scores.shape)
    if causal:
        q = torch.arange(queries, device=query.device).unsqueeze(1)
        k = torch.arange(key.shape[2], device=query.device)
        scores = torch.where(k <= q, scores, float("-inf"))
    return scores


def safe_softmax(scores: Tensor) -> Tensor:
    """softmax of the last dimension, but 0 in a row of -inf, as in PyTorch's attention."""
    if scores.shape[-1] == 0:
        return scores
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.where(empty, 0.0, scores.softmax(-1))


def attention_weights(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """softmax(scale · query·keyᵀ + bias), (batch, key heads, group, queries, keys)."""
    return safe_softmax(_scores(query, key, bias, causal, scale))


def _opmath(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@torch.library.custom_op("webgpu::attention", mutates_args=(), schema=SCHEMA)
def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """softmax(scale · query·keyᵀ + bias) · value, as plain ATen operators.

    Args:
        query: (batch, heads, queries, size), floating.
        key: (batch, key heads, keys, size); key heads divide heads.
        value: (batch, key heads, keys, value size).
        bias: None, or broadcastable to (batch, heads, queries, keys); -inf removes a key.
        causal: keep keys k ≤ q only.
        scale: factor of the scores.

    Returns:
        (batch, heads, queries, value size) in query's dtype, with heads and queries in the order
        that they have in query's memory, as PyTorch's fused attention does. A row without any key
        is 0.
    """
    q, k, v = _opmath(query), _opmath(key), _opmath(value)
    weights = attention_weights(q, k, None if bias is None else _opmath(bias), causal, scale)
    result = _empty_result(query, value)
    result.copy_(torch.matmul(weights, v.unsqueeze(2)).flatten(1, 2))
    return result


def _empty_result(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, queries, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    return query.new_empty((batch, heads, queries, value.shape[3]))


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """A call of the operator (`attention` is its definition)."""
    result: Tensor = torch.ops.webgpu.attention.default(query, key, value, bias, causal, scale)
    return result


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensor:
    torch._check(query.shape[1] % key.shape[1] == 0)  # type: ignore[no-untyped-call]
    return _empty_result(query, value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, bias, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, bias, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, bias, output = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    gradients = attention_gradients(
        grad, query, key, value, bias, output, ctx.causal, ctx.scale, needs
    )
    return *gradients, None, None


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    output: Tensor,
    causal: bool,
    scale: float,
    needs: Sequence[bool],
    kept: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `attention` by query, key, value and bias, with the weights P again.

    dV = PᵀdO, dS = P ⊙ (dO·Vᵀ − Σ dO ⊙ O), dQ = scale·dS·K, dK = scale·dSᵀQ; the bias's is dS.

    Args:
        grad, output: dO and O, (batch, heads, queries, value size).
        needs: which gradients to compute; None takes the place of the others.
        kept: what dropout multiplied the weights by: (batch, key heads, group, queries, keys).
    """
    q, k, v, o, do = (_opmath(t) for t in (query, key, value, output, grad))
    wide_bias = None if bias is None else _opmath(bias)
    weights = attention_weights(q, k, wide_bias, causal, scale)
    groups = (weights.shape[1], weights.shape[2])
    do_grouped = _grouped(do, groups)
    grad_query = grad_key = grad_value = grad_bias = None
    if needs[2]:
        used = weights if kept is None else weights * kept
        grad_value = _sum_group(torch.matmul(used.transpose(-2, -1), do_grouped))
        grad_value = grad_value.to(value.dtype)
    grad_weights = torch.matmul(do_grouped, v.unsqueeze(2).transpose(-2, -1))
    if kept is not None:
        grad_weights = grad_weights * kept
    delta = _grouped((do * o).sum(-1, keepdim=True), groups)
    grad_scores = weights * (grad_weights - delta)
    if needs[0]:
        grad_query = torch.matmul(grad_scores, k.unsqueeze(2)).flatten(1, 2) * scale
        grad_query = grad_query.to(query.dtype)
    if needs[1]:
        grad_key = _sum_group(torch.matmul(grad_scores.transpose(-2, -1), _grouped(q, groups)))
        grad_key = (grad_key * scale).to(key.dtype)
    if bias is not None and needs[3]:
        grad_bias = grad_scores.flatten(1, 2).sum_to_size(bias.shape).to(bias.dtype)
    return grad_query, grad_key, grad_value, grad_bias


def _grouped(tensor: Tensor, groups: tuple[int, int]) -> Tensor:
    """(batch, heads, …) as (batch, key heads, group, …)."""
    return tensor.reshape(tensor.shape[0], *groups, *tensor.shape[2:])


def _sum_group(grad: Tensor) -> Tensor:
    """(batch, key heads, group, …) summed over the queries' heads that share a key head."""
    return grad.squeeze(2) if grad.shape[2] == 1 else grad.sum(2)


attention.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("webgpu::seed", mutates_args=(), schema="(int stream) -> Tensor")
def seed(stream: int) -> Tensor:
    """Two int32 from PyTorch's default generator. ``stream`` tells equal calls apart."""
    return torch.empty(2, dtype=torch.int32).random_()


@seed.register_fake
def _(stream: int) -> Tensor:
    return torch.empty(2, dtype=torch.int32)


WEYL = 0x9E3779B9
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


@torch.library.custom_op(
    "webgpu::uniform", mutates_args=(), schema="(Tensor seed, SymInt[] size) -> Tensor"
)
def uniform(seed: Tensor, size: Sequence[int]) -> Tensor:
    """float32 in [0, 1), multiples of 2⁻²⁴, from an int32 seed of two elements.

    Element i is a hash of (i, seed): twice "lowbias32" (Chris Wellons, "Prospecting for Hash
    Functions", 2018), on a Weyl sequence from the seed's first half, and on the second half.
    """
    numel = 1
    for length in size:
        numel *= length
    mask = 0xFFFFFFFF
    first, second = (seed.to(torch.int64) & mask).unbind()
    x = (torch.arange(numel) * WEYL + first) & mask
    x = _hash(x, mask)
    x = _hash(x ^ second, mask)
    return ((x >> 8).float() * 2.0**-24).reshape(tuple(size))


def _hash(x: Tensor, mask: int) -> Tensor:
    for shift, factor in ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 16)


@uniform.register_fake
def _(seed: Tensor, size: Sequence[int]) -> Tensor:
    return torch.empty(tuple(size), dtype=torch.float32)
