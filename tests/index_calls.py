"""Calls of every operator that takes indices from data, on [5, 4] numbers and 3 or 3×4 indices.

A `Call` is a function of a tensor and a tensor of indices that are in range from 0 to ``size`` - 1;
some operators count negative ones from the end. PyTorch refuses what is out of range on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F = torch.nn.functional
ROWS, COLUMNS = 5, 4


@dataclass(frozen=True)
class Call:
    """``rank``: of the indices; ``wraps``: whether they may be negative; ``dim``: of the error."""

    run: Callable[[Tensor, Tensor], Any]
    size: int = ROWS
    rank: int = 1
    wraps: bool = False
    dim: int | None = 0

    def good(self) -> Tensor:
        """Indices in range, the highest one among them."""
        shape = (3,) if self.rank == 1 else (3, COLUMNS)
        index = torch.arange(torch.Size(shape).numel()).reshape(shape) % self.size
        index.flatten()[-1] = self.size - 1
        return index

    def bad(self, value: int) -> Tensor:
        """The same with one index replaced."""
        index = self.good()
        index.view(-1)[1] = value
        return index

    @property
    def wrong(self) -> tuple[int, ...]:
        """Indices that are out of range, one of them by more than 32 bits."""
        return (self.size, -self.size - 1 if self.wraps else -1, (1 << 32) + 1)


def numbers(dtype: torch.dtype = torch.float32) -> Tensor:
    """What is indexed."""
    return torch.arange(1.0, ROWS * COLUMNS + 1).reshape(ROWS, COLUMNS).to(dtype)


def _put(accumulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, i: x.index_put((i,), x[:3] * 2, accumulate)


GATHERS = {
    "index": Call(lambda x, i: x[i] * 2, wraps=True),
    "index of columns": Call(lambda x, i: x[:, i], COLUMNS, wraps=True, dim=1),
    "index two": Call(lambda x, i: x[i, i % COLUMNS], wraps=True),
    "index of a slice": Call(lambda x, i: x[1:4].t()[:, i], 3, wraps=True, dim=1),
    "index_select": Call(lambda x, i: x.index_select(0, i)),
    "gather": Call(lambda x, i: x.gather(0, i), rank=2),
    "gather columns": Call(lambda x, i: x[:3].gather(1, i), COLUMNS, rank=2, dim=1),
    "take": Call(lambda x, i: x.take(i), ROWS * COLUMNS, wraps=True, dim=None),
    "embedding": Call(lambda x, i: F.embedding(i, x)),
    "embedding_bag": Call(lambda x, i: F.embedding_bag(i[None], x, mode="sum")),
    "row sums of an embedding": Call(lambda x, i: F.embedding(i, x).sum(-1)),
    "softmax of an embedding": Call(lambda x, i: F.embedding(i, x).softmax(-1)),
    "product with an embedding": Call(lambda x, i: F.embedding(i, x) @ x.t()),
    "nll_loss": Call(lambda x, i: F.nll_loss(x[:3], i), COLUMNS, dim=1),
    "cross_entropy": Call(lambda x, i: F.cross_entropy(x[:3], i), COLUMNS, dim=1),
}
SCATTERS = {
    "index_put": Call(_put(False), wraps=True),
    "index_put accumulate": Call(_put(True), wraps=True),
    "scatter": Call(lambda x, i: x.scatter(0, i, x[:3] * 2), rank=2),
    "scatter value": Call(lambda x, i: x.scatter(0, i, 7.0), rank=2),
    "scatter_add": Call(lambda x, i: x.scatter_add(0, i, x[:3]), rank=2),
    "scatter_reduce": Call(lambda x, i: x.scatter_reduce(0, i, x[:3], "amax"), rank=2),
    "index_add": Call(lambda x, i: x.index_add(0, i, x[:3])),
    "index_copy": Call(lambda x, i: x.index_copy(0, i, x[:3] * 2)),
    "index_fill": Call(lambda x, i: x.index_fill(0, i, 7.0), wraps=True),
    "index_reduce": Call(lambda x, i: x.index_reduce(0, i, x[:3], "prod")),
    "max_unpool1d": Call(
        lambda x, i: F.max_unpool1d(x[None, :1, :3], i[None, None], 2), 6, dim=None
    ),
    "put": Call(lambda x, i: x.put(i, x[:3, 0] * 2), ROWS * COLUMNS, wraps=True, dim=None),
}
CALLS = GATHERS | SCATTERS
