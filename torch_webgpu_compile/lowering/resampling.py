"""Interpolation as gathers, its gradient as one scatter. Source: ATen ``UpSample.h``.

A result element is a weighted sum of taps per dimension: 1 (nearest), 2 (linear) or 4 (cubic).
Shapes: input [N, C, *space].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import dtypes
from ..dtypes import DType
from ..ir.folding import fold
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr
from ..torch_private import unset_fake_temporarily
from .builder import Builder
from .fx_nodes import bytes_of
from .indexing import gathered
from .promotion import compute_dtype
from .registry import NotLowered, lowers
from .scattering import scatter
from .special import polynomial
from .symbols import literal
from .value import IndexLike, Value, positions, zeros

aten = torch.ops.aten
F32 = dtypes.float32
CUBIC = -0.75  # the coefficient of PyTorch's bicubic kernel


@dataclass(frozen=True)
class Tap:
    """An element of the input along one dimension, and its weight (None for 1)."""

    index: IndexLike
    weight: Scalar | None


@dataclass(frozen=True)
class Inverse:
    """A scale factor that is a symbol: one over it."""

    body: Scalar


@dataclass(frozen=True)
class InterpolatedAxis:
    """One dimension that is interpolated, at one position of the result.

    Attributes:
        at: the position.
        size_in, size_out: of the input and of the result.
        factor: the scale factor that was given, if any; a symbol is positive.
        dtype: of positions in the input.
    """

    at: Expr
    size_in: Expr
    size_out: Expr
    factor: float | Inverse | None
    dtype: DType

    def scale(self, dtype: DType) -> Scalar:
        """Input elements per output element."""
        if isinstance(self.factor, Inverse):
            return cast(self.factor.body, dtype)
        if self.factor is not None and self.factor > 0:
            return literal(1.0 / self.factor, dtype)
        return _ratio(self.size_in, self.size_out, dtype)

    def source(self, *, align: bool, cubic: bool) -> Scalar:
        """The input position that the output position samples."""
        position = cast(Index(self.at), self.dtype)
        if align:
            if self.size_out is ONE:
                return const(0.0, self.dtype)
            return position * _ratio(self.size_in - 1, self.size_out - 1, self.dtype)
        centered = (position + 0.5) * self.scale(self.dtype) - 0.5
        return centered if cubic else apply("maximum", centered, 0.0)

    def clamped(self, index: Scalar) -> Scalar:
        """The index in the input that is nearest to one that may be outside."""
        return fold(apply("minimum", apply("maximum", index, 0), Index(self.size_in - 1)))


Taps = Callable[[InterpolatedAxis], list[Tap]]
Factors = Sequence[float | Inverse | None]


def _ratio(numerator: Expr, denominator: Expr, dtype: DType) -> Scalar:
    if numerator.is_constant and denominator.is_constant:
        return literal(numerator.constant / denominator.constant, dtype)
    return cast(Index(numerator), dtype) / cast(Index(denominator), dtype)


def _exact_factor(axis: InterpolatedAxis) -> int:
    """The factor if it is a power of two, so that float arithmetic is exact; else 0."""
    size_in, size_out = axis.size_in, axis.size_out
    if not (size_in.is_constant and size_out.is_constant) or size_in.constant == 0:
        return 0
    whole = size_out.constant // size_in.constant
    exact = whole * size_in.constant == size_out.constant and whole & (whole - 1) == 0
    return whole if exact and axis.factor in (None, float(whole)) else 0


def nearest_taps(exact: bool) -> Taps:
    """⌊position · scale⌋, or with ``exact`` of the element's centre; always in float32."""

    def taps(axis: InterpolatedAxis) -> list[Tap]:
        whole = _exact_factor(axis)
        if whole:
            return [Tap(axis.at // whole, None)]
        position = cast(Index(axis.at), F32)
        if exact:
            position += 0.5
        return [Tap(axis.clamped(_whole(apply("floor", position * axis.scale(F32)))), None)]

    return taps


def _whole(number: Scalar) -> Scalar:
    """A whole float as an index: sizes fit 32 bits, and GPUs convert to those at once."""
    return cast(cast(number, dtypes.int32), dtypes.int64)


def linear_taps(align: bool) -> Taps:
    """The two neighbours, weighted by distance."""

    def taps(axis: InterpolatedAxis) -> list[Tap]:
        source = axis.source(align=align, cubic=False)
        low = axis.clamped(_whole(apply("floor", source)))
        right = apply("minimum", apply("maximum", source - cast(low, axis.dtype), 0.0), 1.0)
        return [Tap(low, 1.0 - right), Tap(axis.clamped(low + 1), right)]

    return taps


def cubic_taps(align: bool) -> Taps:
    """Four neighbours with the weights of cubic convolution; the border repeats."""

    def taps(axis: InterpolatedAxis) -> list[Tap]:
        source = axis.source(align=align, cubic=True)
        floor = apply("floor", source)
        t = source - floor
        base, rest = _whole(floor), 1.0 - t
        weights = [_far(t + 1.0), _near(t), _near(rest), _far(rest + 1.0)]
        return [Tap(axis.clamped(base + (k - 1)), weight) for k, weight in enumerate(weights)]

    return taps


def _near(x: Scalar) -> Scalar:
    """(a+2)x³ − (a+3)x² + 1 for |x| ≤ 1."""
    return polynomial(x, (CUBIC + 2, -(CUBIC + 3), 0.0, 1.0))


def _far(x: Scalar) -> Scalar:
    """ax³ − 5ax² + 8ax − 4a for 1 < |x| < 2."""
    return polynomial(x, (CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC))


def _all_taps(
    taps: Taps,
    at: Sequence[Expr],
    sizes_in: Sequence[Expr],
    sizes_out: Sequence[Expr],
    factors: Factors,
    dtype: DType,
) -> list[list[Tap]]:
    axes = zip(at, sizes_in, sizes_out, factors, strict=True)
    return [taps(InterpolatedAxis(*axis, dtype)) for axis in axes]


def resample(builder: Builder, value: Value, taps: Taps, factors: Factors) -> Value:
    """[N, C, *space] interpolated to the result's sizes: the sum of taps times their weights.

    Raises NotLowered: for integers, where the taps have weights.
    """
    sizes = builder.out.sizes
    index = positions(sizes)
    dtype = compute_dtype(value.dtype)
    found = _all_taps(taps, index[2:], value.sizes[2:], sizes[2:], factors, dtype)
    if all(len(options) == 1 and options[0].weight is None for options in found):
        at: list[IndexLike] = [*index[:2], *(options[0].index for options in found)]
        return gathered(builder, value, at, sizes)
    if not value.dtype.is_float:
        raise NotLowered(f"interpolation of {value.dtype.name}")
    total: Scalar | None = None
    for chosen in combinations(*found):
        term = cast(value.at([*index[:2], *(tap.index for tap in chosen)]), dtype)
        for tap in chosen:
            if tap.weight is not None:
                term *= cast(tap.weight, dtype)
        total = term if total is None else total + term
    assert total is not None
    return builder.pointwise(cast(total, value.dtype), sizes)


def resample_backward(builder: Builder, grad: Value, taps: Taps, factors: Factors) -> Value:
    """The input's gradient: each element of ``grad`` added to its taps, times their weights.

    One scatter over (positions, taps). Raises NotLowered: where `scatter` does.
    """
    out = builder.out
    space_in, space_out = out.sizes[2:], grad.sizes[2:]
    rank = len(space_in)
    dtype = compute_dtype(grad.dtype)
    at = positions(space_out)
    counts = [len(t) for t in _all_taps(taps, at, space_in, space_out, factors, dtype)]
    ranges = (*grad.sizes, *map(as_expr, counts))
    symbols = positions(ranges)
    index, chosen = symbols[: rank + 2], symbols[rank + 2 :]
    found = _all_taps(taps, index[2:], space_in, space_out, factors, dtype)
    body = cast(grad.at(index), dtype)
    places: list[IndexLike] = list(index[:2])
    for options, which in zip(found, chosen, strict=True):
        place, weight = _chosen(options, which)
        places.append(place)
        if weight is not None:
            body *= cast(weight, body.dtype)
    initial = zeros(out.sizes, out.dtype)
    return scatter(builder, initial, ranges, places, body, accumulate=True)


def _chosen(options: list[Tap], which: Expr) -> tuple[IndexLike, Scalar | None]:
    """Tap number ``which``."""
    first, *rest = reversed(options)
    if not rest:
        return first.index, first.weight
    place, weight = first.index, first.weight
    assert weight is not None
    for number, tap in reversed(list(enumerate(options[:-1]))):
        is_it = apply("eq", Index(which), number)
        assert not isinstance(place, Expr)
        assert not isinstance(tap.index, Expr)
        assert tap.weight is not None
        place = where(is_it, tap.index, place)
        weight = where(is_it, tap.weight, weight)
    return place, weight


def _factors(builder: Builder, rank: int, given: Sequence[float | None]) -> Factors:
    """The factors of all dimensions, which are an operator's last arguments."""
    arguments = builder.traced[0]
    traced = arguments[len(arguments) - len(given) :] if given else ()
    found = [
        Inverse(builder.reader.symbolic_scalar(1.0 / factor))
        if isinstance(factor, torch.SymFloat) and not factor.node.is_constant()
        else factor
        for factor in traced
    ]
    return [*found, *([None] * rank)][:rank]


def _register(name: str, rank: int, make_taps: Callable[..., Taps], aligns: bool) -> None:
    """Registers an interpolation of ``rank`` dimensions, and its gradient.

    The arguments behind the sizes are the factors of the dimensions, before them (``aligns``)
    whether the corners are aligned: that is what ``make_taps`` is given.
    """

    def forward(builder: Builder, self: Value, output_size: Sequence[IntLike], *rest: Any) -> Value:
        align, factors = rest[:aligns], _factors(builder, rank, rest[aligns:])
        if self.dtype is dtypes.uint8 and align and rank == 2:
            cubic = make_taps is cubic_taps
            return resample_uint8(
                builder, self, cubic=cubic, antialias=False, align=align[0], factors=factors
            )
        return resample(builder, self, make_taps(*align), factors)

    def backward(
        builder: Builder,
        grad_output: Value,
        output_size: Sequence[IntLike],
        input_size: Sequence[IntLike],
        *rest: Any,
    ) -> Value:
        align, factors = rest[:aligns], _factors(builder, rank, rest[aligns:])
        return resample_backward(builder, grad_output, make_taps(*align), factors)

    lowers(getattr(aten, name).default)(forward)
    lowers(getattr(aten, f"{name}_backward").default)(backward)


for _rank in (1, 2, 3):
    _register(f"upsample_nearest{_rank}d", _rank, partial(nearest_taps, False), aligns=False)
    _register(f"_upsample_nearest_exact{_rank}d", _rank, partial(nearest_taps, True), aligns=False)
_register("upsample_linear1d", 1, linear_taps, aligns=True)
_register("upsample_bilinear2d", 2, linear_taps, aligns=True)
_register("upsample_trilinear3d", 3, linear_taps, aligns=True)
_register("upsample_bicubic2d", 2, cubic_taps, aligns=True)


# -- uint8 images --------------------------------------------------------------------------------

# Interpolated in integers, as Pillow does it (ATen ``UpSampleKernel``), a dimension at a time, the
# last one first: weights are 16-bit integers w with ``precision`` bits after the point, and an
# element is clamp((half + Σ w · x) >> precision, 0, 255). Weights are computed in float64 while
# compiling, so the sizes must be known then.
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


def _pitch(size_in: int, size_out: int, align: bool, factor: float | None) -> float:
    """Input elements per output element."""
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
    moved = (total + (1 << found.precision - 1)) >> found.precision
    moved = apply("minimum", apply("maximum", moved, 0), 255)
    return builder.pointwise(cast(moved, dtypes.uint8), sizes)


def resample_uint8(
    builder: Builder,
    value: Value,
    *,
    cubic: bool,
    antialias: bool,
    align: bool,
    factors: Factors,
) -> Value:
    """Bilinear or bicubic interpolation of uint8 [N, C, H, W] to the result's sizes.

    Raises:
        NotLowered: a symbolic size.
    """
    sizes = builder.out.sizes
    if value.is_empty:
        return zeros(sizes, value.dtype)
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
        factor = factors[dim - 2]
        if isinstance(factor, Inverse):
            raise NotLowered("uint8 images by a symbolic factor, of which weights are made")
        scale = _pitch(size_in, size_out, align, factor)
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
        *scales: float | None,
    ) -> Value:
        """Antialiased interpolation of uint8 images [N, C, H, W]; see `resample_uint8`.

        Floats never get here: ``capture/decompositions/sampling.py`` makes matrix products of them.
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
            factors=_factors(builder, 2, scales),
        )


_register_antialiased("_upsample_bilinear2d_aa", cubic=False)
_register_antialiased("_upsample_bicubic2d_aa", cubic=True)
