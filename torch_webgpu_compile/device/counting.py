"""Operators whose results have sizes that depend on data: a number or two comes to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from .host import run_on_host
from .masks import Choice


def _numbers(*values: Tensor) -> list[int]:
    """Whole numbers from the GPU, in one download."""
    found: list[int] = torch.stack([value.to(torch.int64) for value in values]).tolist()
    return found


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """``aten::bincount``."""
    if self.dim() != 1 or self.is_floating_point() or self.dtype is torch.bool:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    low, high = _numbers(*self.aminmax()) if self.numel() else [0, -1]
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is None or not self.numel():
        weights = torch.ones(self.shape, dtype=torch.int64, device=self.device)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    totals = torch.zeros(max(minlength, high + 1), dtype=weights.dtype, device=self.device)
    return totals.index_add_(0, self.to(torch.int64), weights)


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """``aten::repeat_interleave.Tensor``: each position k, ``repeats[k]`` times, in order."""
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int32, torch.int64):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if not repeats.numel():
        return torch.empty_like(repeats)
    ends = repeats.cumsum(0)
    if output_size is None:
        output_size, lowest = _numbers(ends[-1], repeats.amin())
        if lowest < 0:
            raise RuntimeError("repeats can not be negative")
    place = torch.arange(output_size, device=repeats.device)
    return torch.searchsorted(ends, place, right=True).to(repeats.dtype)


def unique(
    self: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_unique2``: (distinct values, each element's position there, their counts)."""
    if not self.numel():
        return unique_consecutive(self, return_inverse, return_counts)
    values, order = self.reshape(-1).sort()
    found, places, counts = unique_consecutive(values, return_inverse, return_counts)
    if return_inverse:
        places = torch.empty_like(places).index_copy_(0, order, places).view(self.shape)
    return found, places, counts


def unique_without_counts(
    self: Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten::_unique``."""
    values, places, _ = unique(self, sorted, return_inverse)
    return values, places


def unique_dim(
    self: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::unique_dim``: what is different along a dimension, as rows in order, NaN last."""
    if _is_for_host(self, dim):
        return _on_host(torch.ops.aten.unique_dim.default, self, dim)
    if not self.numel():
        return unique_consecutive(self, dim=dim)
    order = _ranks_of_rows(_as_rows(self, dim)).argsort()
    found, places, counts = unique_consecutive(self.index_select(dim, order), True, True, dim)
    return found, torch.empty_like(places).index_copy_(0, order, places), counts


def unique_consecutive(
    self: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::unique_consecutive``; along a dimension with everything, asked for or not."""
    if dim is None:
        return _of_elements(self, return_inverse, return_counts)
    if _is_for_host(self, dim):
        return _on_host(torch.ops.aten.unique_dim_consecutive.default, self, dim)
    if not self.numel():
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return self.new_empty(self.shape), none, none.clone()
    rows = _as_rows(self, dim)
    starts = torch.ones(len(rows), dtype=torch.bool, device=self.device)
    starts[1:].copy_((rows[1:] != rows[:-1]).any(1))
    choice = Choice.of(starts)
    found = choice.take(self.movedim(dim, 0)).movedim(0, dim)
    places = choice.ranks.to(torch.int64) - 1
    return found, places, _counts(places, choice.count)


def unique_dim_consecutive(
    self: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::unique_dim_consecutive``."""
    return unique_consecutive(self, return_inverse, return_counts, dim)


def _of_elements(
    self: Tensor, return_inverse: bool, return_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.empty(0, dtype=torch.int64, device=self.device)
    flat = self.reshape(-1)
    if not flat.numel():
        return flat.clone(), none.view(self.shape) if return_inverse else none, none.clone()
    starts = torch.ones(flat.shape, dtype=torch.bool, device=self.device)
    starts[1:].copy_(flat[1:] != flat[:-1])
    choice = Choice.of(starts)
    places = choice.ranks.to(torch.int64) - 1
    counts = _counts(places, choice.count) if return_counts else none
    return choice.take(flat), places.view(self.shape) if return_inverse else none, counts


def _counts(places: Tensor, count: int) -> Tensor:
    """How often each of ``count`` places is there."""
    counts = torch.zeros(count, dtype=torch.int64, device=places.device)
    return counts.index_add_(0, places, torch.ones_like(places))


def _is_for_host(self: Tensor, dim: int) -> bool:
    """Whether an error is to be raised."""
    if self.is_complex() or not -self.dim() <= dim < self.dim():
        return True
    return list(self.shape).count(0) > (self.shape[dim] == 0)


def _on_host(op: torch._ops.OpOverload, self: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = run_on_host(op, (self, dim), {})
    return found


def _as_rows(self: Tensor, dim: int) -> Tensor:
    return self.movedim(dim, 0).reshape(self.shape[dim], -1)


def _ranks_of_rows(rows: Tensor) -> Tensor:
    """int64 (n,): the places of n rows in lexicographic order; equal ones, and NaN, have one.

    Elements are ranked within their columns; then two neighbouring columns of ranks are one of
    pairs, which are ranked again, until one column is left.
    """
    keys = rows.t()
    while True:
        values, order = keys.sort(dim=1)
        differ = values[:, 1:] != values[:, :-1]
        if values.is_floating_point():  # NaN is the last, and differs from itself
            differ &= values[:, :-1] == values[:, :-1]
        ranks = torch.zeros(order.shape, dtype=torch.int64, device=rows.device)
        ranks[:, 1:].copy_(differ.cumsum(1))
        ranks = torch.empty_like(ranks).scatter_(1, order, ranks)
        columns = len(ranks)
        if columns == 1:
            return ranks[0]
        keys = ranks[0 : columns - 1 : 2] * len(rows) + ranks[1::2]
        if columns % 2:
            keys = torch.cat([keys, ranks[-1:]])
