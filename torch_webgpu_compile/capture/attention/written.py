"""Attention written out in plain operators becomes ``webgpu::attention``: its arithmetic.

`matching` finds it in Dynamo's graph, and puts a call of `attend_as_written` in its place, which
AOTAutograd traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import attention_ops
from ..decompositions import random

ScoreStep = tuple[Any, ...]
"""What is done to scores, and in how many dimensions: ("multiply" | "divide", rank, factor),
("add", rank, term, factor), ("fill", rank, mask, value) or ("choose", rank, condition, value).
Factors are numbers or tensors of one element, terms and values numbers or tensors that can be
broadcast to scores, as masks and conditions are."""

Permutation = Sequence[int] | None


def attend_as_written(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Sequence[ScoreStep],
    permutations: Sequence[Permutation],
    leading: Sequence[Any] | None,
    dropout: float,
    dtypes: Sequence[torch.dtype],
    contiguous: bool,
) -> Tensor:
    """dropout(softmax(steps(query · keyᵀ))) · value.

    Scores and weights stay in float32, where 16-bit operators round both.

    Args:
        query, key, value: (…, queries, size), (…, keys, size), (…, keys, value size), each after
            its permutation; … is (batch, heads), (batch · heads) or nothing. Key heads may divide
            heads.
        permutations: of query, key, value, and of the result; None keeps dimensions.
        leading: (batch, heads) where some scores have both and some have them as one dimension; ()
            if query and key have both.
        dtypes: that products take, and of the result.
        contiguous: whether the result's memory must be that of a product.
    """
    q, k, v = (
        (tensor if order is None else tensor.permute(tuple(order))).to(dtypes[0])
        for tensor, order in zip((query, key, value), permutations, strict=False)
    )
    rank = v.dim()
    if leading is not None and not leading:
        leading = tuple(a if b == 1 else b for a, b in zip(q.shape[:2], k.shape[:2], strict=True))
    q, k, v = _broadcast(*(_with_heads(tensor, leading) for tensor in (q, k, v)))
    scores = _Scores(q, leading)
    for kind, *operands in steps:
        getattr(scores, kind)(*operands)
    seed = random.seed() if dropout > 0.0 else None
    options = attention_ops.AttentionOptions(
        scores.bias, False, scores.scale, seed, dropout, scores.replaced, safe=False
    )
    result, _ = attention_ops.attend(scores.query, k, v, options)
    result = result.to(dtypes[1])
    if rank == 3:
        result = result.flatten(0, 1) if leading is not None else result.squeeze(1)
    elif rank == 2:
        result = result.squeeze(1).squeeze(0)
    if contiguous:
        result = result.contiguous()
    order = permutations[3]
    return result if order is None else result.permute(tuple(order))


class _Scores:
    """scale · query · keyᵀ where nothing replaces it, + bias: what steps make of a product.

    Attributes:
        query: times the factors that are tensors.
        bias: float32, broadcastable to (batch, heads, queries, keys), or None.
        replaced: bool, as broadcastable, or None.
    """

    def __init__(self, query: Tensor, leading: Sequence[Any] | None) -> None:
        self.query = query
        self.scale = 1.0
        self.bias: Tensor | None = None
        self.replaced: Tensor | None = None
        self._leading = leading

    def multiply(self, _: int, factor: Any) -> None:
        """Multiplies the scores by a number or by a tensor of one element."""
        if isinstance(factor, Tensor):
            factor = factor.reshape(())
            self.query = (self.query * factor).to(self.query.dtype)
        else:
            factor = float(factor)
            self.scale *= factor
        if self.bias is not None:
            self.bias = self.bias * factor

    def divide(self, rank: int, divisor: Any) -> None:
        """Divides the scores by a number or by a tensor of one element."""
        if isinstance(divisor, Tensor):
            self.multiply(rank, 1.0 / divisor.float())
            return
        divisor = float(divisor)
        self.scale /= divisor
        if self.bias is not None:
            self.bias = self.bias / divisor

    def add(self, rank: int, term: Any, factor: float) -> None:
        """Adds ``factor`` times a number or a tensor; ``rank`` is that of the scores."""
        term = self._term(term, rank)
        if factor != 1:
            term = term * factor
        self.bias = term if self.bias is None else self.bias + term

    def fill(self, rank: int, mask: Tensor, value: Any) -> None:
        """Replaces the scores by ``value`` where ``mask`` is True."""
        mask = self._with_heads(mask, rank)
        bias = 0.0 if self.bias is None else self.bias
        self.bias = torch.where(mask, self._value(value, rank), bias)
        self.replaced = mask if self.replaced is None else self.replaced | mask

    def choose(self, rank: int, condition: Tensor, value: Any) -> None:
        """Replaces the scores by ``value`` where ``condition`` is False."""
        condition = self._with_heads(condition, rank)
        bias = 0.0 if self.bias is None else self.bias
        self.bias = torch.where(condition, bias, self._value(value, rank))
        mask = condition.logical_not()
        self.replaced = mask if self.replaced is None else self.replaced | mask

    def _value(self, value: Any, rank: int) -> Any:
        return self._term(value, rank) if isinstance(value, Tensor) else float(value)

    def _term(self, term: Any, rank: int) -> Tensor:
        if not isinstance(term, Tensor):
            return self.query.new_full((), float(term), dtype=torch.float32)
        return self._with_heads(term, rank).to(torch.float32)

    def _with_heads(self, tensor: Tensor, rank: int) -> Tensor:
        """What is broadcastable to scores of a rank as broadcastable to those of heads."""
        if rank != 3 or tensor.dim() != 3:
            return tensor
        if self._leading is None:
            return tensor.unsqueeze(1)
        return tensor if tensor.shape[0] == 1 else _with_heads(tensor, self._leading)


def _with_heads(tensor: Tensor, leading: Sequence[Any] | None) -> Tensor:
    """(batch, heads, rows, columns) of what may have one dimension for both of the first, or none.

    Without ``leading`` one dimension is the batch.
    """
    if tensor.dim() == 3:
        if leading is None:
            return tensor.unsqueeze(1)
        return tensor.reshape(*leading, *tensor.shape[1:])
    return tensor[None, None] if tensor.dim() == 2 else tensor


def _broadcast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three with one batch size, and heads that the operator takes.

    Key and value keep fewer heads than the query where both have the same number of them.
    """
    batch = next((t.shape[0] for t in (query, key, value) if t.shape[0] != 1), 1)
    heads = max(tensor.shape[1] for tensor in (query, key, value))
    if query.shape[1] != heads:
        query = query.expand(-1, heads, -1, -1)
    if key.shape[1] != value.shape[1]:
        key, value = (t.expand(-1, heads, -1, -1) for t in (key, value))
    found = (t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in (query, key, value))
    return next(found), next(found), next(found)
