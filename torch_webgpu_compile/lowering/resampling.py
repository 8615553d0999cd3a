"""Interpolation as gathers, its gradient as one scatter. Source: ATen ``UpSample.h``.

A result element is a weighted sum of taps per dimension: 1 (nearest), 2 (linear) or 4 (cubic).
Shapes: input [N, C, *space].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product as combinations

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.folding import fold
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr
from .builder import Builder
from .fixed_point_resampling import resample_uint8
from .indexing import gathered
from .promotion import compute_dtype
from .registry import LoweringFunction, NotLowered, lowers
from .scattering import scatter
from .symbols import literal
from .value import IndexLike, Value, positions

aten = torch.ops.aten
F32 = dtypes.float32
CUBIC = -0.75  # the coefficient of PyTorch's bicubic kernel


@dataclass(frozen=True)
class Tap:
    """An element of the input along one dimension, and its weight (None for 1)."""

    index: IndexLike
    weight: Scalar | None


Taps = Callable[[Expr, Expr, Expr, "float | None", DType], list[Tap]]
"""(output position, input size, output size, scale factor, dtype of positions) → taps."""


def _scale(size_in: Expr, size_out: Expr, factor: float | None, dtype: DType) -> Scalar:
    """Input elements per output element."""
    if factor is not None and factor > 0:
        return literal(1.0 / factor, dtype)
    return _ratio(size_in, size_out, dtype)


def _ratio(numerator: Expr, denominator: Expr, dtype: DType) -> Scalar:
    if numerator.is_constant and denominator.is_constant:
        return literal(numerator.constant / denominator.constant, dtype)
    return apply("div", cast(Index(numerator), dtype), cast(Index(denominator), dtype))


def _exact_factor(size_in: Expr, size_out: Expr, factor: float | None) -> int:
    """The factor if it is a power of two, so that float arithmetic is exact; else 0."""
    if not (size_in.is_constant and size_out.is_constant) or size_in.constant == 0:
        return 0
    whole = size_out.constant // size_in.constant
    exact = whole * size_in.constant == size_out.constant and whole & (whole - 1) == 0
    return whole if exact and factor in (None, float(whole)) else 0


def nearest_taps(exact: bool) -> Taps:
    """⌊position · scale⌋, or with ``exact`` of the element's centre; always in float32."""

    def taps(
        at: Expr, size_in: Expr, size_out: Expr, factor: float | None, dtype: DType
    ) -> list[Tap]:
        whole = _exact_factor(size_in, size_out, factor)
        if whole:
            return [Tap(at // whole, None)]
        position = cast(Index(at), F32)
        if exact:
            position = apply("add", position, const(0.5, F32))
        position = apply("mul", position, _scale(size_in, size_out, factor, F32))
        return [Tap(_clamped(_floor_index(position), size_in), None)]

    return taps


def _floor_index(position: Scalar) -> Scalar:
    return _whole(apply("floor", position))


def _whole(number: Scalar) -> Scalar:
    """A whole float as an index: sizes fit 32 bits, and GPUs convert to those at once."""
    return cast(cast(number, dtypes.int32), dtypes.int64)


def _clamped(index: Scalar, size: Expr) -> Scalar:
    low = apply("maximum", index, const(0, dtypes.int64))
    return fold(apply("minimum", low, Index(size - 1)))


def _source(
    at: Expr,
    size_in: Expr,
    size_out: Expr,
    factor: float | None,
    dtype: DType,
    *,
    align: bool,
    cubic: bool,
) -> Scalar:
    """The input position that an output position samples."""
    position = cast(Index(at), dtype)
    if align:
        if size_out is ONE:
            return const(0.0, dtype)
        return apply("mul", position, _ratio(size_in - 1, size_out - 1, dtype))
    half = const(0.5, dtype)
    scale = _scale(size_in, size_out, factor, dtype)
    scaled = apply("mul", apply("add", position, half), scale)
    centered = apply("sub", scaled, half)
    return centered if cubic else apply("maximum", centered, const(0.0, dtype))


def linear_taps(align: bool) -> Taps:
    """The two neighbours, weighted by distance."""

    def taps(
        at: Expr, size_in: Expr, size_out: Expr, factor: float | None, dtype: DType
    ) -> list[Tap]:
        source = _source(at, size_in, size_out, factor, dtype, align=align, cubic=False)
        low = _clamped(_floor_index(source), size_in)
        high = _clamped(apply("add", low, const(1, dtypes.int64)), size_in)
        right = apply("sub", source, cast(low, dtype))
        right = apply("minimum", apply("maximum", right, const(0.0, dtype)), const(1.0, dtype))
        return [Tap(low, apply("sub", const(1.0, dtype), right)), Tap(high, right)]

    return taps


def cubic_taps(align: bool) -> Taps:
    """Four neighbours with the weights of cubic convolution; the border repeats."""

    def taps(
        at: Expr, size_in: Expr, size_out: Expr, factor: float | None, dtype: DType
    ) -> list[Tap]:
        source = _source(at, size_in, size_out, factor, dtype, align=align, cubic=True)
        floor = apply("floor", source)
        t = apply("sub", source, floor)
        base = _whole(floor)
        rest = apply("sub", const(1.0, dtype), t)
        distances = [_plus_one(t), t, rest, _plus_one(rest)]
        weights = [_far(distances[0]), _near(t), _near(rest), _far(distances[3])]
        return [
            Tap(_clamped(apply("add", base, const(k - 1, dtypes.int64)), size_in), weight)
            for k, weight in enumerate(weights)
        ]

    return taps


def _plus_one(x: Scalar) -> Scalar:
    return apply("add", x, const(1.0, x.dtype))


def _polynomial(x: Scalar, *coefficients: float) -> Scalar:
    total: Scalar = const(coefficients[0], x.dtype)
    for coefficient in coefficients[1:]:
        total = apply("add", apply("mul", total, x), const(coefficient, x.dtype))
    return total


def _near(x: Scalar) -> Scalar:
    """(a+2)x³ − (a+3)x² + 1 for |x| ≤ 1."""
    return _polynomial(x, CUBIC + 2, -(CUBIC + 3), 0.0, 1.0)


def _far(x: Scalar) -> Scalar:
    """ax³ − 5ax² + 8ax − 4a for 1 < |x| < 2."""
    return _polynomial(x, CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC)


def _all_taps(
    taps: Taps,
    at: Sequence[Expr],
    sizes_in: Sequence[Expr],
    sizes_out: Sequence[Expr],
    factors: Sequence[float | None],
    dtype: DType,
) -> list[list[Tap]]:
    return [
        taps(a, i, o, f, dtype) for a, i, o, f in zip(at, sizes_in, sizes_out, factors, strict=True)
    ]


def resample(builder: Builder, value: Value, taps: Taps, factors: Sequence[float | None]) -> Value:
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
                term = apply("mul", term, cast(tap.weight, dtype))
        total = term if total is None else apply("add", total, term)
    assert total is not None
    return builder.pointwise(cast(total, value.dtype), sizes)


def resample_backward(
    builder: Builder, grad: Value, taps: Taps, factors: Sequence[float | None]
) -> Value:
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
    where: list[IndexLike] = list(index[:2])
    for options, which in zip(found, chosen, strict=True):
        place, weight = _chosen(options, which)
        where.append(place)
        if weight is not None:
            body = apply("mul", body, cast(weight, body.dtype))
    zeros = Value(out.dtype, out.sizes, const(0, out.dtype))
    return scatter(builder, zeros, ranges, where, body, accumulate=True)


def _chosen(options: list[Tap], which: Expr) -> tuple[IndexLike, Scalar | None]:
    """Tap number ``which``."""
    first, *rest = reversed(options)
    if not rest:
        return first.index, first.weight
    place, weight = first.index, first.weight
    assert weight is not None
    for number, tap in reversed(list(enumerate(options[:-1]))):
        is_it = apply("eq", Index(which), const(number, dtypes.int64))
        assert not isinstance(place, Expr)
        assert not isinstance(tap.index, Expr)
        assert tap.weight is not None
        place = apply("where", is_it, tap.index, place)
        weight = apply("where", is_it, tap.weight, weight)
    return place, weight


def _factors(rank: int, given: Sequence[float | None]) -> list[float | None]:
    return [*given, *([None] * rank)][:rank]


def _register_nearest(name: str, rank: int, exact: bool) -> None:
    taps = nearest_taps(exact)

    def forward(
        builder: Builder, self: Value, output_size: Sequence[IntLike], *scales: float | None
    ) -> Value:
        return resample(builder, self, taps, _factors(rank, scales))

    def backward(
        builder: Builder,
        grad_output: Value,
        output_size: Sequence[IntLike],
        input_size: Sequence[IntLike],
        *scales: float | None,
    ) -> Value:
        return resample_backward(builder, grad_output, taps, _factors(rank, scales))

    _register(name, forward, backward)


def _register_smooth(name: str, rank: int, make_taps: Callable[[bool], Taps]) -> None:
    def forward(
        builder: Builder,
        self: Value,
        output_size: Sequence[IntLike],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        factors = _factors(rank, scales)
        if self.dtype is dtypes.uint8 and rank == 2:
            cubic = make_taps is cubic_taps
            return resample_uint8(
                builder, self, cubic=cubic, antialias=False, align=align_corners, factors=factors
            )
        return resample(builder, self, make_taps(align_corners), factors)

    def backward(
        builder: Builder,
        grad_output: Value,
        output_size: Sequence[IntLike],
        input_size: Sequence[IntLike],
        align_corners: bool,
        *scales: float | None,
    ) -> Value:
        taps = make_taps(align_corners)
        return resample_backward(builder, grad_output, taps, _factors(rank, scales))

    _register(name, forward, backward)


def _register(name: str, forward: LoweringFunction, backward: LoweringFunction) -> None:
    lowers(getattr(aten, name).default)(forward)
    lowers(getattr(aten, f"{name}_backward").default)(backward)


for _rank in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_rank}d", _rank, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_rank}d", _rank, exact=True)
_register_smooth("upsample_linear1d", 1, linear_taps)
_register_smooth("upsample_bilinear2d", 2, linear_taps)
_register_smooth("upsample_trilinear3d", 3, linear_taps)
_register_smooth("upsample_bicubic2d", 2, cubic_taps)
