"""Functions for ``flex_attention``, of the kinds that its users write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADS, LENGTH = 4, 72


@dataclass(frozen=True)
class Kind:
    """A score_mod and a mask_mod, each a function behind whose position stands what it captures.

    Attributes:
        function: whether the scores are more than a multiple and a bias.
    """

    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    captured: Callable[[], list[Tensor]] = list
    masked_by: Callable[[], list[Tensor]] = list
    function: bool = False

    def bound(self, *tensors: Tensor) -> tuple[Any, Any]:
        """Both as PyTorch takes them: functions that capture the tensors."""
        count = len(self.captured())
        scores, masks = tensors[:count], tensors[count:]
        score_mod, mask_mod = self.score_mod, self.mask_mod
        return (
            None if score_mod is None else lambda s, b, h, q, k: score_mod(s, b, h, q, k, *scores),
            None if mask_mod is None else lambda b, h, q, k: mask_mod(b, h, q, k, *masks),
        )


def causal(b, h, q, k):
    return q >= k


def documents() -> list[Tensor]:
    return [torch.arange(LENGTH) // 20]


def slopes() -> list[Tensor]:
    return [torch.tensor([0.5, 0.25, 0.125, 0.0625])]


def alibi(s, b, h, q, k, slopes):
    return s + slopes[h] * (k - q)


def capped(s, b, h, q, k):
    return 3 * torch.tanh(s / 3)


KINDS = {
    "plain": Kind(),
    "causal": Kind(mask_mod=causal),
    "sliding window": Kind(mask_mod=lambda b, h, q, k: (q >= k) & (q - k <= 9)),
    "documents": Kind(
        mask_mod=lambda b, h, q, k, of: causal(b, h, q, k) & (of[q] == of[k]), masked_by=documents
    ),
    "alibi": Kind(alibi, causal, slopes),
    "soft cap": Kind(capped, causal, function=True),
    "soft cap of alibi, on documents": Kind(
        lambda s, b, h, q, k, x: capped(alibi(s, b, h, q, k, x), b, h, q, k),
        lambda b, h, q, k, of: of[q] == of[k],
        slopes,
        documents,
        function=True,
    ),
    "a bias for each distance": Kind(
        lambda s, b, h, q, k, bias: s + bias[h, q - k + LENGTH],
        captured=lambda: [torch.linspace(-1, 1, HEADS * 2 * LENGTH).view(HEADS, 2 * LENGTH)],
    ),
    "a temperature for each head": Kind(
        lambda s, b, h, q, k, x: s * x[h], causal, slopes, function=True
    ),
    "a mask among the scores": Kind(
        lambda s, b, h, q, k: torch.where(q >= k, s * 2 - 1, float("-inf"))
    ),
    "replaced scores": Kind(
        lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, -2.0, s.abs() + h) - 0.5, function=True
    ),
    "rows without a key": Kind(mask_mod=lambda b, h, q, k: (q >= 8) & (k < 50) & (b + h > 0)),
    "a product for each score": Kind(
        lambda s, b, h, q, k, x: s + x[q] @ x[k],
        captured=lambda: [torch.linspace(-1, 1, 4 * LENGTH).view(LENGTH, 4)],
    ),
}
READ = {name: kind for name, kind in KINDS.items() if "product" not in name}
