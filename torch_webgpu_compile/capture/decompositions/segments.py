"""Reductions of consecutive rows. Source: ATen ``SegmentReduce``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_KINDS = {"sum": "sum", "mean": "sum", "max": "amax", "min": "amin", "prod": "prod"}
_INITIAL = {"sum": 0.0, "mean": 0.0, "max": -torch.inf, "min": torch.inf, "prod": 1.0}


@dataclass(frozen=True, slots=True)
class _Segments:
    """Which rows of data belong together, the dimensions of the segments' lengths put in one.

    Attributes:
        of_row: the number of each row's segment; rows of none have one that is not `kept`.
        before: the sizes before the rows'.
        count: the number of segments in each of ``before``.
    """

    of_row: Tensor
    before: tuple[int, ...]
    count: int

    @property
    def total(self) -> int:
        """The number of segments, with one for the rows of none in each of ``before``."""
        return math.prod(self.before) * (self.count + 1)

    def rows(self, data: Tensor) -> Tensor:
        """(all rows, …) of data, or of what has its sizes."""
        return data.reshape(-1, *data.shape[len(self.before) + 1 :])

    def kept(self, totals: Tensor) -> Tensor:
        """(*before, count, …) of a row for each segment."""
        found = totals.view(*self.before, self.count + 1, *totals.shape[1:])
        return found.narrow(len(self.before), 0, self.count).clone()

    def spread(self, values: Tensor) -> Tensor:
        """Of a value for each segment (*before, count, …), the one of each row."""
        rest = values.shape[len(self.before) + 1 :]
        none = values.new_zeros((*self.before, 1, *rest))
        values = torch.cat([values, none], len(self.before)).view(-1, *rest)
        return values.index_select(0, self.of_row)

    def reduced(self, rows: Tensor, kind: str, start: float) -> Tensor:
        """Of a value for each row and a first one, one for each of the `total` segments."""
        totals = rows.new_full((self.total, *rows.shape[1:]), start)
        index = self.of_row.view(-1, *[1] * (rows.dim() - 1)).expand_as(rows)
        return totals.scatter_reduce(0, index, rows, kind)

    def sum(self, rows: Tensor) -> Tensor:
        """Of a value for each row, the sum of its segment."""
        totals = rows.new_zeros((self.total, *rows.shape[1:])).index_add(0, self.of_row, rows)
        return totals.index_select(0, self.of_row)


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> _Segments | None:
    """None where there are no elements, or where PyTorch says what is wrong."""
    given = offsets if offsets is not None else lengths
    if given is None or not 0 < given.dim() <= data.dim() or 0 in data.shape:
        return None
    axis = given.dim() - 1
    before = tuple(data.shape[:axis])
    if given.shape[:axis] != before or (offsets is not None and not given.shape[axis]):
        return None
    ends = given.cumsum(axis) if offsets is None else given.narrow(axis, 1, given.shape[axis] - 1)
    rows = torch.arange(data.shape[axis], device=data.device, dtype=ends.dtype)
    rows = rows.expand(*before, -1).contiguous()
    places = torch.searchsorted(ends.contiguous(), rows, right=True)
    count = ends.shape[axis]
    if offsets is not None:
        places = torch.where(rows >= given.narrow(axis, 0, 1), places, count)
    outer = torch.arange(math.prod(before), device=data.device).view(*before, 1)
    return _Segments((outer * (count + 1) + places).reshape(-1), before, count)


def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Any:
    """Consecutive rows reduced; the mean of none is NaN."""
    segments = _segments(data, lengths, offsets)
    if segments is None or indices is not None or axis % data.dim() != len(segments.before):
        return NotImplemented
    if offsets is None and not unsafe:
        assert lengths is not None
        _check_lengths(lengths, data.shape[len(segments.before)])
    start = _INITIAL[reduce] if initial is None else initial
    rows = segments.rows(data)
    found = segments.kept(segments.reduced(rows, _KINDS[reduce], start))
    if reduce != "mean":
        return found
    sizes = torch.zeros(segments.total, dtype=data.dtype, device=data.device)
    sizes = sizes.index_add(0, segments.of_row, torch.ones_like(sizes[:1]).expand(rows.shape[0]))
    sizes = segments.kept(sizes)
    sizes = sizes.view(*sizes.shape, *[1] * (rows.dim() - 1))
    mean = found / sizes
    return mean if initial is None else torch.where(sizes == 0, start, mean)


def _check_lengths(lengths: Tensor, rows: int) -> None:
    message = "lengths contains negative value!"
    aten._assert_async.msg((lengths >= 0).all(), message)
    message = (
        "Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
    )
    aten._assert_async.msg((lengths.sum(-1) == rows).all(), message)


def segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Any:
    """Of an extreme, equal shares to the elements that are it (as in PyTorch, of positive ones)."""
    segments = _segments(data, lengths, offsets)
    if segments is None:
        return NotImplemented
    spread, rows = segments.spread(grad), segments.rows(data)
    if reduce == "sum":
        found = spread
    elif reduce == "mean":
        found = spread / segments.sum(torch.ones_like(rows))
    elif reduce == "prod":
        found = spread * _others(segments, rows, segments.spread(output), initial)
    else:
        is_extreme = (rows == segments.spread(output)) | torch.isnan(rows)
        share = spread / segments.sum(is_extreme.to(rows.dtype))
        found = torch.where(is_extreme, torch.where(spread > 0, share, spread), 0)
    return found.view(data.shape)


def _others(segments: _Segments, rows: Tensor, products: Tensor, initial: float | None) -> Tensor:
    """For each row, the product of the others of its segment, and of the initial number.

    Where the row can be divided by, a quotient, as in PyTorch.
    """
    is_zero, is_nan = rows == 0, torch.isnan(rows)
    is_left = is_zero | is_nan
    start = 1.0 if initial is None else initial
    kept = segments.reduced(torch.where(is_left, 1, rows), "prod", start)
    kept = kept.index_select(0, segments.of_row)
    zeros, nans = (segments.sum(x.to(rows.dtype)) - x.to(rows.dtype) for x in (is_zero, is_nan))
    others = torch.where(nans > 0, torch.nan, torch.where(zeros > 0, kept * 0, kept))
    return torch.where(is_left, others, products / rows)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.segment_reduce.default: segment_reduce,
    aten._segment_reduce_backward.default: segment_reduce_backward,
}
