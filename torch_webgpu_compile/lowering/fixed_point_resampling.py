"""Interpolation of uint8 images in integers, as Pillow does it. Source: ATen ``UpSampleKernel``.

A dimension at a time, the last one first: weights are 16-bit integers w with ``precision`` bits
after the point, and an element is clamp((half + Σ w · x) >> precision, 0, 255). Weights are
computed in float64 while compiling, so the sizes must be known then.
Shapes: input [N, C, H, W].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .. import dtypes
from ..ir.scalar import Index, apply, cast, const
from ..symbolic.sizes import Expr, IntLike, as_expr
from .builder import Builder
from .fx_nodes import bytes_of
from .registry import NotLowered, lowers
from .value import IndexLike, Value, positions

aten = torch.ops.aten
I32 = dtypes.int32

_MOST_BITS = 22
_WEIGHT_BITS = 15  # below the sign


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(a: float) -> Callable[[Tensor], Tensor]:
    def weight(x: Tensor) -> Tensor:
        x = x.abs()
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))

    return weight


@dataclass(frozen=True)
class _Weights:
    """Element i of a result reads elements first[i], first[i] + 1, … with the weights of row i."""

    first: np.ndarray[Any, Any]
    weights: np.ndarray[Any, Any]
    precision: int


def _rounded(first: Tensor, weights: Tensor, largest: float) -> _Weights:
    """Weights with as many bits as let the largest fit."""
    precision = 0
    while precision < _MOST_BITS and int(0.5 + largest * (1 << precision + 1)) < 1 << _WEIGHT_BITS:
        precision += 1
    scaled = weights * (1 << precision)
    rounded = (scaled + torch.where(scaled < 0, -0.5, 0.5)).to(torch.int32)
    return _Weights(bytes_of(first), bytes_of(rounded), precision)


def _antialiased(
    size_in: int, size_out: int, scale: float, taps: int, weight: Callable[[Tensor], Tensor]
) -> _Weights:
    support = taps * 0.5 * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    centre = scale * (torch.arange(size_out, dtype=torch.float64) + 0.5)
    first = (centre - support + 0.5).to(torch.int64).clamp_min(0)
    last = (centre + support + 0.5).to(torch.int64).clamp_max(size_in)
    most = int(-(-support // 1)) * 2 + 1
    count = (last - first).clamp(0, most)
    tap = torch.arange(most)
    distance = (tap + first.unsqueeze(1) - centre.unsqueeze(1) + 0.5) * inverse
    found = torch.where(tap < count.unsqueeze(1), weight(distance), 0.0)
    total = torch.zeros(size_out, dtype=torch.float64)
    for k in range(most):  # in order: another one gives other last bits
        total += found[:, k]
    found /= torch.where(total == 0, 1.0, total).unsqueeze(1)
    return _rounded(first, found, float(found.max()))


def _plain(
    size_in: int,
    size_out: int,
    scale: float,
    taps: int,
    weight: Callable[[Tensor], Tensor],
    align: bool,
) -> _Weights:
    """A fixed number of taps; the weights of those outside are added to the border's."""
    at = torch.arange(size_out, dtype=torch.float64)
    source = at * scale if align else (at + 0.5) * scale - 0.5
    if taps == 2 and not align:
        source = source.clamp_min(0)
    near = source.float().floor().to(torch.int64).clamp_max(size_in - 1)
    part = (source - near).clamp(0, 1)
    start = near - taps // 2 + 1
    first = start.clamp_min(0)
    weights = torch.zeros(size_out, taps, dtype=torch.float64)
    largest = 0.0
    for k in range(taps):
        place = ((start + k).clamp(0, size_in - 1) - first).unsqueeze(1)
        weights.scatter_add_(1, place, weight(k + 1 - taps // 2 - part).unsqueeze(1))
        # PyTorch looks at sums before they are complete.
        largest = max(largest, float(weights.gather(1, place).max()))
    return _rounded(first, weights, largest)


def _scale(size_in: int, size_out: int, align: bool, factor: float | None) -> float:
    if align:
        return (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else size_in / size_out


def _pass(builder: Builder, value: Value, dim: int, size: Expr, found: _Weights) -> Value:
    """One dimension resampled."""
    taps = as_expr(found.weights.shape[1])
    name = f"{builder.hint}_first", f"{builder.hint}_weights"
    first = builder.constant(found.first, dtypes.int64, (size,), name[0])
    weights = builder.constant(found.weights, I32, (size, taps), name[1])
    sizes = (*value.sizes[:dim], size, *value.sizes[dim + 1 :])
    index = positions(sizes)
    (tap,) = positions((taps,), "r")
    place = first.at([index[dim]]) + Index(tap)
    place = apply("minimum", place, Index(value.sizes[dim] - 1))  # its weight is 0 beyond
    at: list[IndexLike] = [*index[:dim], place, *index[dim + 1 :]]
    body = cast(value.at(at), I32) * weights.at([index[dim], tap])
    total = builder.reduce("sum", body, sizes, (taps,), name="sum").body
    half = const(1 << found.precision - 1, I32)
    moved = total + half >> found.precision
    moved = apply("minimum", apply("maximum", moved, 0), 255)
    return builder.pointwise(cast(moved, dtypes.uint8), sizes)


def resample_uint8(
    builder: Builder,
    value: Value,
    *,
    cubic: bool,
    antialias: bool,
    align: bool,
    factors: Sequence[float | None],
) -> Value:
    """Bilinear or bicubic interpolation of uint8 [N, C, H, W] to the result's sizes.

    Raises:
        NotLowered: a symbolic size.
    """
    sizes = builder.out.sizes
    if value.is_empty:
        return Value(value.dtype, sizes, const(0, value.dtype))
    taps = 4 if cubic else 2
    # Pillow's coefficient with antialiasing, OpenCV's without.
    weight = _cubic(-0.5 if antialias else -0.75) if cubic else _triangle
    for dim in (3, 2):
        before, after = value.sizes[dim], sizes[dim]
        if before is after:
            continue
        if not (before.is_constant and after.is_constant):
            raise NotLowered("uint8 images of symbolic sizes, whose weights need float64")
        size_in, size_out = before.constant, after.constant
        scale = _scale(size_in, size_out, align, factors[dim - 2])
        with unset_fake_temporarily():  # weights are real numbers, also while compiling
            if antialias:
                found = _antialiased(size_in, size_out, scale, taps, weight)
            else:
                found = _plain(size_in, size_out, scale, taps, weight, align)
        value = _pass(builder, value, dim, after, found)
    return value


def _register_antialiased(name: str, cubic: bool) -> None:
    @lowers(getattr(aten, name).default)
    def lower(
        builder: Builder,
        self: Value,
        output_size: Sequence[IntLike],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        """Antialiased interpolation of uint8 images [N, C, H, W]; see `resample_uint8`.

        Floats never get here: ``capture/antialiasing.py`` decomposes them into matrix products.
        Raises NotLowered: for any other dtype, and for symbolic sizes.
        """
        if self.dtype is not dtypes.uint8:
            raise NotLowered(f"antialiased interpolation of {self.dtype.name}")
        return resample_uint8(
            builder,
            self,
            cubic=cubic,
            antialias=True,
            align=align_corners,
            factors=(scales_h, scales_w),
        )


_register_antialiased("_upsample_bilinear2d_aa", cubic=False)
_register_antialiased("_upsample_bicubic2d_aa", cubic=True)
