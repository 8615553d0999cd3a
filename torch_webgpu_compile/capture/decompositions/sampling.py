"""Grid sampling in three dimensions and its gradients, and interpolation with antialiasing.

Source: ATen ``GridSampler.h``, ``UpSample.h``. Shapes: input [N, C, *space], grid [N, *places, D]
with coordinates in [-1, 1], the last dimension of the space first; result [N, C, *places]. Inside,
places are flat: P of them in a space of S.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.dtypes import opmath
from ...torch_private import suggest_memory_format

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = range(3)  # values of ``interpolation_mode``
_ZEROS, _BORDER, _REFLECTION = range(3)  # values of ``padding_mode``
_CUBIC = -0.75


@dataclass(frozen=True)
class _Tap:
    """One of the elements along a dimension that a place reads, all over [N, P].

    ``index`` is in range; ``inside`` says where the element exists. ``slope`` is the derivative of
    ``weight`` by the coordinate in the grid.
    """

    index: Tensor
    inside: Tensor
    weight: Tensor
    slope: Tensor


def _clipped(position: Tensor, slope: Tensor, size: int) -> tuple[Tensor, Tensor]:
    moves = (position > 0) & (position < size - 1)
    return position.clamp(0, size - 1), torch.where(moves, slope, 0)


def _reflected(position: Tensor, slope: Tensor, size: int, align: bool) -> tuple[Tensor, Tensor]:
    """Positions reflected at the centres, or at the edges, of the outermost elements."""
    low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
    if span == 0:
        return torch.zeros_like(position), torch.zeros_like(slope)
    moved = position - low
    slope = torch.where(moved < 0, -slope, slope)
    moved = moved.abs()
    flips = (moved / span).floor()
    rest = torch.fmod(moved, span)
    odd = torch.fmod(flips, 2) == 1
    position = torch.where(odd, span - rest, rest) + low
    return position, torch.where(odd, -slope, slope)


def _padded(
    position: Tensor, slope: Tensor, size: int, padding: int, align: bool
) -> tuple[Tensor, Tensor]:
    if padding == _REFLECTION:
        position, slope = _reflected(position, slope, size, align)
    if padding != _ZEROS:
        position, slope = _clipped(position, slope, size)
    return position, slope


def _tap(position: Tensor, size: int, weight: Tensor, slope: Tensor) -> _Tap:
    inside = (position >= 0) & (position <= size - 1)
    return _Tap(torch.where(inside, position, 0).to(torch.int64), inside, weight, slope)


def _taps(coordinate: Tensor, size: int, mode: int, padding: int, align: bool) -> list[_Tap]:
    """What places with these coordinates read along a dimension."""
    factor = (size - 1) / 2 if align else size / 2
    position = (coordinate + 1) * factor - (0 if align else 0.5)
    slope = torch.full_like(position, factor)
    if mode == _BICUBIC:
        return _cubic_taps(position, slope, size, padding, align)
    position, slope = _padded(position, slope, size, padding, align)
    if mode == _NEAREST:
        one = torch.ones_like(position)
        return [_tap(position.round(), size, one, torch.zeros_like(position))]
    low = position.floor()
    right = position - low
    return [_tap(low, size, 1 - right, -slope), _tap(low + 1, size, right, slope)]


def _cubic_taps(
    position: Tensor, slope: Tensor, size: int, padding: int, align: bool
) -> list[_Tap]:
    """Four neighbours; padding is for each of them, and does not bend the slope."""
    low = position.floor()
    t = position - low
    a = _CUBIC
    found = []
    for offset in range(-1, 3):
        x = (t - offset).abs()
        if offset in (0, 1):  # (a+2)x³ − (a+3)x² + 1
            weight = ((a + 2) * x - (a + 3)) * x * x + 1
            change = (3 * (a + 2) * x - 2 * (a + 3)) * x
        else:  # ax³ − 5ax² + 8ax − 4a
            weight = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
            change = (3 * a * x - 10 * a) * x + 8 * a
        change = change if offset <= 0 else -change
        place, _ = _padded(low + offset, slope, size, padding, align)
        found.append(
            _tap(place.round() if padding == _REFLECTION else place, size, weight, change * slope)
        )
    return found


def _all_taps(
    input: Tensor, grid: Tensor, mode: int, padding: int, align: bool
) -> list[list[_Tap]]:
    space = input.shape[2:]
    flat = opmath(grid).flatten(1, -2)
    count = len(space)
    return [_taps(flat[..., count - 1 - k], space[k], mode, padding, align) for k in range(count)]


def _corners(
    taps: Sequence[Sequence[_Tap]], space: Sequence[int]
) -> Iterator[tuple[tuple[_Tap, ...], Tensor, Tensor]]:
    """(a tap per dimension, the flat index, whether the element exists) over [N, 1, P]."""
    for chosen in product(*taps):
        index, inside = torch.zeros_like(chosen[0].index), torch.ones_like(chosen[0].inside)
        for tap, size in zip(chosen, space, strict=True):
            index, inside = index * size + tap.index, inside & tap.inside
        yield chosen, index.unsqueeze(1), inside.unsqueeze(1)


def _weight(taps: Sequence[_Tap]) -> Tensor:
    total = taps[0].weight
    for tap in taps[1:]:
        total = total * tap.weight
    return total.unsqueeze(1)


def grid_sampler_3d(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    """The input at the places of the grid."""
    if 0 in input.shape or 0 in grid.shape:
        return NotImplemented
    taps = _all_taps(input, grid, interpolation_mode, padding_mode, align_corners)
    flat = opmath(input).flatten(2)
    channels = input.shape[1]
    total: Tensor | None = None
    for chosen, index, inside in _corners(taps, input.shape[2:]):
        read = flat.gather(2, index.expand(-1, channels, -1))
        part = torch.where(inside, read * _weight(chosen), 0)
        total = part if total is None else total + part
    assert total is not None
    return total.view(*total.shape[:2], *grid.shape[1:-1]).to(input.dtype)


def grid_sampler_backward(
    grad_output: Tensor,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> Any:
    """(gradient of the input, of the grid), each where ``output_mask`` asks."""
    if 0 in input.shape or 0 in grid.shape:
        return NotImplemented
    taps = _all_taps(input, grid, interpolation_mode, padding_mode, align_corners)
    grad, flat = opmath(grad_output).flatten(2), opmath(input).flatten(2)
    grad_input = torch.zeros_like(flat)
    slopes: list[Any] = [0] * len(taps)
    for chosen, index, inside in _corners(taps, input.shape[2:]):
        at = index.expand_as(grad)
        if output_mask[0]:
            added = torch.where(inside, grad * _weight(chosen), 0)
            grad_input = grad_input.scatter_add(2, at, added)
        if output_mask[1] and interpolation_mode != _NEAREST:
            pull = torch.where(inside, flat.gather(2, at) * grad, 0).sum(1)
            for k, tap in enumerate(chosen):
                rest = math.prod(
                    (t.weight for j, t in enumerate(chosen) if j != k), start=tap.slope
                )
                slopes[k] = slopes[k] + pull * rest
    grad_grid = torch.zeros_like(grid)
    if interpolation_mode != _NEAREST and output_mask[1]:
        grad_grid = torch.stack(slopes[::-1], -1).view(grid.shape).to(grid.dtype)
    return (
        grad_input.view(input.shape).to(input.dtype) if output_mask[0] else None,
        grad_grid if output_mask[1] else None,
    )


# -- interpolation with antialiasing -------------------------------------------------------------

# Two products with matrices of weights: an output element is the mean of inputs under a filter as
# wide as the output's pitch. The weights of a dimension are a matrix (output size, input size).
_ANTIALIASED_CUBIC = -0.5  # Pillow's coefficient, not that of PyTorch's other bicubic kernels


def _linear(x: Tensor) -> Tensor:
    return (1 - x).clamp_min(0)


def _cubic(x: Tensor) -> Tensor:
    a = _ANTIALIASED_CUBIC
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


_FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bilinear": (_linear, 2),
    "bicubic": (_cubic, 4),
}


def _weights(
    kind: str, size_in: int, size_out: int, align: bool, factor: float | None, like: Tensor
) -> Tensor:
    """The weights (size_out, size_in) of one dimension, in the dtype that PyTorch computes in."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if align:
        scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    else:
        scale = 1.0 / factor if factor is not None and factor > 0 else size_in / size_out
    filter_of, taps = _FILTERS[kind]
    support = taps * 0.5 * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    centre = (torch.arange(size_out, dtype=dtype, device=like.device) + 0.5).unsqueeze(1) * scale
    first = (centre - support + 0.5).to(torch.int32).clamp_min(0)
    last = (centre + support + 0.5).to(torch.int32).clamp_max(size_in)
    place = torch.arange(size_in, dtype=torch.int32, device=like.device)
    distance = (place.to(dtype) - centre + 0.5) * inverse
    weights = torch.where((place >= first) & (place < last), filter_of(distance.abs()), 0.0)
    return weights / weights.sum(1, keepdim=True)


def _laid_out_like(source: Tensor, result: Tensor) -> Tensor:
    """``result``, which is contiguous, in the memory format of ``source``."""
    memory_format = suggest_memory_format(source)
    is_same = memory_format is torch.contiguous_format
    return result if is_same else result.clone(memory_format=memory_format)


def _interpolate(
    kind: str,
    self: Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    if not self.is_floating_point() or 0 in self.shape:
        return NotImplemented
    heights, widths = zip(self.shape[2:], output_size, strict=True)
    rows = _weights(kind, *heights, align_corners, scales_h, self)
    columns = _weights(kind, *widths, align_corners, scales_w, self)
    result = (rows @ (self.to(rows.dtype) @ columns.mT)).to(self.dtype)
    return _laid_out_like(self, result)


def _interpolate_backward(
    kind: str,
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Any:
    if 0 in grad_output.shape:
        return NotImplemented
    heights, widths = zip(input_size[2:], output_size, strict=True)
    rows = _weights(kind, *heights, align_corners, scales_h, grad_output)
    columns = _weights(kind, *widths, align_corners, scales_w, grad_output)
    result = (rows.mT @ (grad_output.to(rows.dtype) @ columns)).to(grad_output.dtype)
    # As ATen's kernels for the CPU have it.
    return result if kind == "bicubic" else _laid_out_like(grad_output, result)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.grid_sampler_3d.default: grid_sampler_3d,
    aten.grid_sampler_2d_backward.default: grid_sampler_backward,
    aten.grid_sampler_3d_backward.default: grid_sampler_backward,
    aten._upsample_bilinear2d_aa.default: partial(_interpolate, "bilinear"),
    aten._upsample_bilinear2d_aa_backward.default: partial(_interpolate_backward, "bilinear"),
    aten._upsample_bicubic2d_aa.default: partial(_interpolate, "bicubic"),
    aten._upsample_bicubic2d_aa_backward.default: partial(_interpolate_backward, "bicubic"),
}
