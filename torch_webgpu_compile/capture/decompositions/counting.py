"""Histograms, repetitions, ranges, shares of rows.

Source: ATen ``SummaryOps``, ``RangeFactories``, ``Embedding``, ….
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...torch_private import linspace_reference

aten = torch.ops.aten


def _counted(places: Tensor, inside: Tensor, bins: int, weights: Tensor) -> Tensor:
    """The sum of weights in each bin; what is not inside goes to one bin more."""
    places = torch.where(inside, places, bins)
    totals = torch.zeros(bins + 1, dtype=weights.dtype, device=places.device)
    return totals.index_add(0, places, weights)[:bins].clone()


# Bits of a float32 that a 16-bit float does not have.
_DROPPED = {torch.float16: 13, torch.bfloat16: 16}


def _rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers with the fraction of a 16-bit dtype; as they are for another dtype.

    A conversion would not do: fused kernels hold 16-bit floats as float32.
    """
    if dtype not in _DROPPED:
        return numbers
    dropped = _DROPPED[dtype]
    bits = numbers.view(torch.int32)
    half = (1 << dropped - 1) - 1 + (bits >> dropped & 1)
    return (bits + half & -(1 << dropped)).view(torch.float32)


def _floor_of_quotient(dividend: Tensor, divisor: Tensor) -> Tensor:
    """⌊dividend / divisor⌋ of numbers ≥ 0 where the quotient is rounded first, as IEEE 754 says.

    GPUs divide to within 2.5 ULP, and edges are common among elements. The quotient is rounded up
    to an integer if it is within half of the distance to the number before that.
    """
    below = torch.div(dividend, divisor, rounding_mode="floor")
    above = below + 1
    missing = divisor - torch.fmod(dividend, divisor)
    half = (above - torch.nextafter(above, torch.zeros_like(above))) / 2
    return torch.where(missing <= divisor * half, above, below)


def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """How many elements are in each of equal parts of [min, max], by default of all elements.

    Of integers it is what CUDA gives, in their dtype: the CPU has no kernel for them.
    """
    if bins <= 0 or self.dtype == torch.bool or self.is_complex():
        return NotImplemented
    dtype, is_float = self.dtype, self.is_floating_point()
    if not is_float:
        min, max = int(min), int(max)
    wide = torch.promote_types(dtype, torch.float32) if is_float else torch.int64
    flat = self.reshape(-1).to(wide)
    low, high = (_rounded(bound, dtype) for bound in _bounds(flat, min, max))
    inside = (flat >= low) & (flat <= high)
    if dtype in _DROPPED:  # each operation rounds there
        above = _rounded(_rounded(flat - low, dtype) * bins, dtype)
        places = _rounded(above / _rounded(high - low, dtype), dtype)
    elif is_float:
        places = _floor_of_quotient((flat - low) * bins, high - low)
    else:
        places = torch.div((flat - low) * bins, high - low, rounding_mode="trunc")
    places = places.to(torch.int64).clamp(0, bins - 1)
    return _counted(places, inside, bins, torch.ones_like(self.reshape(-1)))


def _bounds(flat: Tensor, min: float, max: float) -> tuple[Tensor, Tensor]:
    """The first bin's start and the last one's end: of all elements where both are the same."""
    low, high = torch.full_like(flat[:1].sum(), min), torch.full_like(flat[:1].sum(), max)
    if min == max and flat.numel():
        low, high = flat.amin(), flat.amax()
    empty = low == high
    return torch.where(empty, low - 1, low), torch.where(empty, high + 1, high)


def _histogram(
    self: Tensor, edges: Tensor, weight: Tensor | None, density: bool
) -> tuple[Tensor, Tensor]:
    flat = self.reshape(-1)
    bins = edges.shape[0] - 1
    places = (torch.searchsorted(edges, flat, right=True) - 1).clamp(0, bins - 1)
    inside = (flat >= edges[0]) & (flat <= edges[-1])
    weights = torch.ones_like(flat) if weight is None else weight.reshape(-1)
    counts = _counted(places, inside, bins, weights)
    if density:
        counts = counts / counts.sum() / edges.diff()
    return counts, edges


def histogram(
    self: Tensor,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Any:
    """(counts, edges) of equal bins; the last one has both of its ends."""
    if self.numel() == 0 and range is None:
        return NotImplemented
    if range is None:
        low, high = self.amin(), self.amax()
    else:
        low, high = self.new_full((), range[0]), self.new_full((), range[1])
    empty = low == high
    low, high = torch.where(empty, low - 0.5, low), torch.where(empty, high + 0.5, high)
    place = torch.arange(bins + 1, device=self.device)
    step = (high - low) / bins
    # From the nearer end, as ``linspace`` does.
    edges = torch.where(place < (bins + 1) // 2, low + step * place, high - step * (bins - place))
    return _histogram(self, edges.to(self.dtype), weight, density)


def histogram_of_edges(
    self: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    """(counts, edges) of bins given by their edges."""
    return _histogram(self, bins.clone(), weight, density)


def linspace(start: Any, end: Any, steps: int, **keywords: Any) -> Any:
    """Integers from one to another: multiples of a rational step, rounded towards 0.

    PyTorch's kernels compute them in float64; its decomposition does it in float32.
    """
    dtype = keywords.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return linspace_reference(start, end, steps, **keywords)
    low, high = (x.to(torch.int64) if isinstance(x, Tensor) else int(x) for x in (start, end))
    if any(isinstance(x, int) and abs(x) * steps >= 1 << 62 for x in (low, high)):
        return linspace_reference(start, end, steps, **keywords)
    place = torch.arange(steps, device=keywords.get("device"))
    parts = max(steps - 1, 1)
    return torch.div(low * parts + (high - low) * place, parts, rounding_mode="trunc").to(dtype)


def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Any:
    """Position k ``repeats[k]`` times; their number must be known."""
    if output_size is None:
        return NotImplemented
    ends = repeats.cumsum(0)
    place = torch.arange(output_size, device=repeats.device, dtype=ends.dtype)
    return torch.searchsorted(ends, place, right=True).to(repeats.dtype)


def nonzero_static(self: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Positions of the first ``size`` elements that are not 0."""
    chosen = (self != 0).reshape(-1)
    order = torch.where(chosen, chosen.cumsum(0) - 1, size).clamp(max=size)
    place = torch.arange(chosen.shape[0], device=self.device)
    columns = []
    for length in reversed(self.shape):
        columns.append(place % length)
        place = place // length
    if not columns or size == 0:
        return torch.full((size, self.dim()), fill_value, dtype=torch.int64, device=self.device)
    rows = torch.stack(columns[::-1], 1)
    table = torch.full((size + 1, self.dim()), fill_value, dtype=torch.int64, device=self.device)
    return table.index_copy(0, order, rows)[:size].clone()


def _triangle(is_lower: bool, row: int, col: int, offset: int = 0, **keywords: Any) -> Any:
    """int (2, n): rows and columns of the lower or upper triangle of a matrix.

    PyTorch's decomposition takes square roots in float64.
    """
    dtype, device = keywords.get("dtype") or torch.int64, keywords.get("device")
    if row < 0 or col < 0 or dtype not in (torch.int32, torch.int64):
        return NotImplemented
    last = offset if is_lower else offset - 1  # the last diagonal of the lower one
    count = _below_diagonal(row + last, col) - _below_diagonal(last, col)
    place = torch.arange(row, device=device)
    edge = (place + (last + 1)).clamp(0, col)
    if is_lower:
        begins, ends = torch.zeros_like(place), edge
    else:
        begins, ends, count = edge, torch.full_like(place, col), row * col - count
    if not count:
        return torch.empty((2, 0), dtype=dtype, device=device)
    totals = (ends - begins).cumsum(0)
    place = torch.arange(count, device=device)
    rows = torch.searchsorted(totals, place, right=True)
    columns = place + (ends - totals).index_select(0, rows)
    return torch.stack([rows, columns]).to(dtype)


def _below_diagonal(rows: int, col: int) -> int:
    """Σ min(k, col) for k from 1 to ``rows``."""
    rows = max(rows, 0)
    whole = max(rows - col, 0)
    return (rows - whole) * (rows - whole + 1) // 2 + whole * col


def embedding_renorm(self: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Rows that are used and longer than ``max_norm`` made as long as that."""
    used = torch.zeros(self.shape[0], dtype=torch.bool, device=self.device)
    used = used.index_fill(0, indices.reshape(-1), True)
    norms = torch.linalg.vector_norm(self, norm_type, dim=1)
    scale = torch.where(used & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    return self * scale.unsqueeze(1)


def embedding_dense_backward(
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    """With ``scale_grad_by_freq``, each row's gradient over how often it was read."""
    if not scale_grad_by_freq or grad_output.numel() == 0:
        return NotImplemented
    rows = indices.reshape(-1)
    counts = torch.zeros(num_weights, dtype=torch.int32, device=rows.device)
    counts = counts.index_add(0, rows, torch.ones_like(rows, dtype=torch.int32))
    share = grad_output / counts.index_select(0, rows).reshape(indices.shape).unsqueeze(-1)
    return aten.embedding_dense_backward.default(share, indices, num_weights, padding_idx, False)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.embedding_renorm.default: embedding_renorm,
    aten.histc.default: histc,
    aten.histogram.bin_ct: histogram,
    aten.histogram.bins_tensor: histogram_of_edges,
    aten.linspace.default: linspace,
    aten.linspace.Tensor_Tensor: linspace,
    aten.linspace.Tensor_Scalar: linspace,
    aten.linspace.Scalar_Tensor: linspace,
    aten.repeat_interleave.Tensor: repeat_interleave,
    aten.tril_indices.default: partial(_triangle, True),
    aten.triu_indices.default: partial(_triangle, False),
    aten.nonzero_static.default: nonzero_static,
}
