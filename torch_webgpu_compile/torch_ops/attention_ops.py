"""``webgpu::attention`` and its gradient: operators for capture to use and lowering to know.

PyTorch's own attention decomposes into a dozen operators while a graph is traced; these do not.
They are defined here in plain ATen operators, which hold all scores in memory. Lowering makes them
kernels that do not.

Shapes: query (batch, heads, queries, size), key (batch, key heads, keys, size), value (batch, key
heads, keys, value size); key heads divide heads, and consecutive heads share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..torch_private import _check, guard_or_false
from . import custom_ops as _custom_ops  # noqa: F401  defines webgpu::uniform
from .score_functions import parsed

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal, Scalar scale, "
    "Tensor? seed=None, Scalar dropout=0.0, Tensor? replaced=None, bool safe=True, "
    "str score_mod='', Tensor[]? operands=None) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor logsumexp, "
    "Tensor delta, bool causal, Scalar scale, Tensor? seed=None, Scalar dropout=0.0, "
    "Tensor? replaced=None, bool safe=True, str score_mod='', Tensor[]? operands=None) "
    "-> (Tensor, Tensor, Tensor)"
)
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True, slots=True)
class AttentionOptions(Generic[_Tensor]):
    """The arguments of attention beside query, key and value; tensors may be those of a stage.

    A bias cannot say what ``scores.masked_fill(mask, value)`` says: such scores do not depend on
    query and key, whose products may be NaN and get no gradient. This is a bias of the value, with
    ``replaced``.

    Attributes:
        bias: None, or broadcastable to (batch, heads, queries, keys); -inf removes a key.
        causal: keep keys k ≤ q only.
        scale: factor of the scores.
        seed: int32 (2,) of `webgpu::uniform`, with ``dropout``: element (b, h, q, k) is kept where
            the uniform number at this position is at least ``dropout``.
        replaced: bool, broadcastable as the bias; True: the score is the bias alone.
        safe: a row without any key (every score is -inf) is 0, as PyTorch's fused attention has it;
            otherwise NaN, as softmax has it.
        score_mod: the text of a `ScoreFunction` that is applied to each scaled score before all
            others are; "" for none.
        operands: of ``score_mod``, broadcastable as the bias; without gradients. None for none.
    """

    bias: _Tensor | None
    causal: bool
    scale: float
    seed: _Tensor | None = None
    dropout: float = 0.0
    replaced: _Tensor | None = None
    safe: bool = True
    score_mod: str = ""
    operands: Sequence[_Tensor] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operators' arguments, in the order of their schemas."""
        return tuple(getattr(self, field.name) for field in fields(self))


Options = AttentionOptions[Tensor]


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scale · query·keyᵀ + bias)) · value, and the logsumexp of the scores.

    This is the definition of ``webgpu::attention``. Unlike its kernels it takes any head size and
    floating dtype.

    Returns:
        (batch, heads, queries, value size) in query's dtype, with heads and queries in the order
        that they have in query's memory, as PyTorch's fused attention does; and (batch, heads,
        queries) in float32 (float64 of such), a row without any key is -inf. Not ``safe``, the
        latter is (2, batch, heads, queries): the highest scores, and log Σ exp(score - highest),
        whose sum would not keep the second where all keys of a row have a score like -1e9.
    """
    scores = _scores(query, key, options)
    weights = safe_softmax(scores) if options.safe else scores.softmax(-1)
    kept = _kept(scores, options)
    if kept is not None:
        weights = weights * kept
    result = _empty_result(query, value)
    result.copy_(torch.matmul(weights, _opmath(value).unsqueeze(2)).flatten(1, 2))
    if options.safe:
        return result, torch.logsumexp(scores, -1).flatten(1, 2)
    highest = scores.amax(-1)
    rest = (scores - highest.unsqueeze(-1)).exp().sum(-1).log()
    return result, torch.stack([highest, rest]).flatten(2, 3)


@torch.library.custom_op("webgpu::attention", mutates_args=(), schema=SCHEMA)
def attention(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """`plain_attention` as an operator."""
    return plain_attention(query, key, value, AttentionOptions(*options))


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _check(query.shape[1] % key.shape[1] == 0)  # type: ignore[no-untyped-call]
    safe = AttentionOptions(*options).safe
    rows = query.shape[:3] if safe else (2, *query.shape[:3])
    statistic = query.new_empty(rows, dtype=_opmath_dtype(query))
    return _empty_result(query, value), statistic


def plain_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    logsumexp: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `plain_attention` by query, key and value: ``webgpu::attention_backward``.

    With the weights P = exp(scores − logsumexp) again, and what dropout keeps of them:
    dV = (kept·P)ᵀdO, dS = P ⊙ (kept·dO·Vᵀ − delta), dQ = scale·dS·K, dK = scale·dSᵀQ, where dQ and
    dK take dS as 0 for what is ``replaced``, and else times the derivative of ``score_mod``.

    Where every key of a row has a bias like -1e9 instead of -inf, the sum's logarithm is lost in
    the logsumexp's rounding, and such a row's weights are 1 each, if ``safe``. PyTorch's fused
    kernels, on CPU and CUDA, start from the same number and give the same.

    Args:
        grad: dO, (batch, heads, queries, value size).
        logsumexp: the operator's second result.
        delta: Σ dO ⊙ O over the value size, less the gradient of the logsumexp if it has one,
            (batch, heads, queries), in logsumexp's dtype.
    """
    q, k, do = _opmath(query), _opmath(key), _opmath(grad)
    weights, grad_scores, kept = _grad_scores(grad, query, key, value, options, logsumexp, delta)
    if options.replaced is not None:
        grad_scores = grad_scores.masked_fill(_by_score(options.replaced, grad_scores), 0.0)
    if options.score_mod:
        given = {"score": _products(query, key, options), "gradient": grad_scores}
        operands = [_by_score(operand, grad_scores) for operand in options.operands or ()]
        grad_scores = parsed(options.score_mod).gradient().of(given, operands)
    used = weights if kept is None else weights * kept
    groups = (weights.shape[1], weights.shape[2])
    grad_query = torch.matmul(grad_scores, k.unsqueeze(2)).flatten(1, 2) * options.scale
    grad_key = torch.matmul(grad_scores.transpose(-2, -1), _grouped(q, groups)).sum(2)
    grad_value = torch.matmul(used.transpose(-2, -1), _grouped(do, groups)).sum(2)
    return (
        grad_query.to(query.dtype).contiguous(),
        (grad_key * options.scale).to(key.dtype).contiguous(),
        grad_value.to(value.dtype).contiguous(),
    )


@torch.library.custom_op("webgpu::attention_backward", mutates_args=(), schema=BACKWARD_SCHEMA)
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    logsumexp: Tensor,
    delta: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_attention_backward` as an operator."""
    found = AttentionOptions(bias, *options)
    return plain_attention_backward(grad, query, key, value, found, logsumexp, delta)


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *rest = inputs
    options: Options = AttentionOptions(*rest)
    tensors = options.bias, options.seed, options.replaced, *(options.operands or ())
    ctx.save_for_backward(query, key, value, *output, *tensors)
    ctx.options = replace(options, bias=None, seed=None, replaced=None, operands=None)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Any, ...]:
    query, key, value, output, logsumexp, bias, seed, replaced, *operands = ctx.saved_tensors
    options = replace(
        ctx.options, bias=bias, seed=seed, replaced=replaced, operands=operands or None
    )
    needs = ctx.needs_input_grad[:4]
    if grad is None:
        grad = torch.zeros_like(output)
    results = output, logsumexp
    gradients = attention_gradients(
        grad, query, key, value, options, *results, needs, grad_logsumexp=grad_logsumexp
    )
    found = (*gradients, *[None] * 7, [None] * len(operands) or None)
    return found[: len(ctx.needs_input_grad)]  # without arguments that the call left out


attention.register_autograd(_backward, setup_context=_setup_context)


def attention_gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    output: Tensor,
    logsumexp: Tensor,
    needs: Sequence[bool],
    plain: bool = False,
    grad_logsumexp: Tensor | None = None,
) -> Gradients:
    """The gradients of `attention` by query, key, value and bias.

    Args:
        output, logsumexp: the operator's results.
        needs: which gradients to compute; None takes the place of the others.
        plain: in ordinary operators, for what has no kernel.
        grad_logsumexp: the gradient of the logsumexp of ``safe`` attention, if it has one.
    """
    delta = (_opmath(grad) * _opmath(output)).sum(-1)
    if grad_logsumexp is not None:
        assert options.safe
        delta = delta - grad_logsumexp
    inputs = grad, query, key, value, options, logsumexp, delta
    found: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[:3]):
        bias, *rest = options.arguments
        operator = torch.ops.webgpu.attention_backward.default
        given = (grad, query, key, value, bias, logsumexp, delta, *rest)
        results = plain_attention_backward(*inputs) if plain else operator(*given)
        found = tuple(g if need else None for g, need in zip(results, needs[:3], strict=True))
    grad_bias = None
    if options.bias is not None and needs[3]:
        # All of it is asked for where the bias is not broadcast, so there is nothing to save.
        _, grad_scores, _ = _grad_scores(*inputs)
        bias = options.bias
        grad_bias = grad_scores.flatten(1, 2).sum_to_size(bias.shape).to(bias.dtype)
    return found[0], found[1], found[2], grad_bias


def attend(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """A call of the operator, whose head sizes are numbers: kernels are made for them."""
    int(query.shape[-1]), int(value.shape[-1])
    result: tuple[Tensor, Tensor] = torch.ops.webgpu.attention.default(
        query, key, value, *options.arguments
    )
    return result


def safe_softmax(scores: Tensor) -> Tensor:
    """softmax of the last dimension, but 0 in a row of -inf, as in PyTorch's attention."""
    if scores.shape[-1] == 0:
        return scores
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.where(empty, 0.0, scores.softmax(-1))


def _grad_scores(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    logsumexp: Tensor,
    delta: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weights, the gradient of the biased scores, and what dropout multiplies weights by.

    Each is (batch, key heads, group, queries, keys).
    """
    scores = _scores(query, key, options)
    groups = (scores.shape[1], scores.shape[2])
    if options.safe:
        shift = torch.where(logsumexp == float("-inf"), 0.0, logsumexp)
        weights = (scores - _grouped(shift, groups).unsqueeze(-1)).exp()
    else:
        highest, rest = (_grouped(row, groups).unsqueeze(-1) for row in logsumexp.unbind(0))
        weights = (scores - highest - rest).exp()
    v = _opmath(value).unsqueeze(2)
    grad_weights = torch.matmul(_grouped(_opmath(grad), groups), v.transpose(-2, -1))
    kept = _kept(scores, options)
    if kept is not None:
        grad_weights = grad_weights * kept
    return weights, weights * (grad_weights - _grouped(delta, groups).unsqueeze(-1)), kept


def masked_scores(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """All scores, as softmax takes them: (batch, heads, queries, keys)."""
    return _scores(query, key, options).flatten(1, 2)


def _scores(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """Scaled and biased scores, (batch, key heads, group, queries, keys)."""
    scores = _products(query, key, options)
    if options.score_mod:
        operands = [_by_score(operand, scores) for operand in options.operands or ()]
        scores = parsed(options.score_mod).of({"score": scores}, operands)
    if options.replaced is not None:
        scores = torch.where(_by_score(options.replaced, scores), 0.0, scores)
    if options.bias is not None:
        scores = scores + _by_score(_opmath(options.bias), scores)
    if options.causal:
        row = torch.arange(scores.shape[-2], device=query.device).unsqueeze(1)
        column = torch.arange(scores.shape[-1], device=query.device)
        scores = torch.where(column <= row, scores, float("-inf"))
    return scores


def _products(query: Tensor, key: Tensor, options: Options) -> Tensor:
    """Scaled products of queries and keys, (batch, key heads, group, queries, keys)."""
    q, k = _opmath(query), _opmath(key)
    batch, heads, queries, size = q.shape
    grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], queries, size)
    return torch.matmul(grouped, k.unsqueeze(2).transpose(-2, -1)) * options.scale


def _by_score(tensor: Tensor, scores: Tensor) -> Tensor:
    """A tensor that broadcasts to (batch, heads, queries, keys), in the shape of scores."""
    batch, _, _, queries, keys = scores.shape
    full = tensor.expand(batch, scores.shape[1] * scores.shape[2], queries, keys)
    return full.reshape(scores.shape)


def _kept(scores: Tensor, options: Options) -> Tensor | None:
    """The factor of dropout for weights: 0, or 1 / (1 - dropout); None without dropout."""
    if options.seed is None:
        return None
    if options.dropout >= 1.0:
        return torch.zeros_like(scores)
    # Groups of heads are in the order of heads, so that positions are those of the heads.
    uniform = torch.ops.webgpu.uniform.default
    numbers: Tensor = uniform(options.seed, list(scores.shape), scores.device)
    return (numbers >= options.dropout) * (1.0 / (1.0 - options.dropout))


def _empty_result(query: Tensor, value: Tensor) -> Tensor:
    batch, heads, queries, _ = query.shape
    if guard_or_false(query.stride(1) < query.stride(2)):
        return query.new_empty((batch, queries, heads, value.shape[3])).transpose(1, 2)
    return query.new_empty((batch, heads, queries, value.shape[3]))


def _grouped(tensor: Tensor, groups: tuple[int, int]) -> Tensor:
    """(batch, heads, …) as (batch, key heads, group, …)."""
    return tensor.reshape(tensor.shape[0], *groups, *tensor.shape[2:])


def _opmath_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _opmath(tensor: Tensor) -> Tensor:
    return tensor.to(_opmath_dtype(tensor))
