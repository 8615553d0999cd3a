"""Pooling as reductions over windows. Source: ATen ``max_pool2d_with_indices``, ``avg_pool2d``, ….

Shapes: input [N, C, *space] or [C, *space].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..sizes import ZERO, Expr, IntLike, as_expr, ceildiv, contiguous_strides
from .builder import Builder, extreme, masked
from .convolution import all_of, in_range
from .promotion import compute_dtype
from .reductions import converted
from .registry import NotLowered, lowers
from .value import Value, positions

aten = torch.ops.aten
Window = tuple[Expr, ...]


def spread(values: Sequence[IntLike], rank: int, default: Window = ()) -> Window:
    """One entry per space dimension from ATen's short forms."""
    entries = tuple(as_expr(v) for v in values)
    if not entries:
        return default
    return entries * rank if len(entries) == 1 else entries


class Windows:
    """Sliding windows over the trailing dimensions of a value."""

    def __init__(
        self,
        value: Value,
        sizes: tuple[Expr, ...],
        kernel: Window,
        stride: Window,
        padding: Window,
        dilation: Window,
    ) -> None:
        self.value = value
        self.kernel = kernel
        self.sizes = sizes
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.lead = value.rank - len(kernel)
        self.space = value.sizes[self.lead :]

    def positions_of(self, taps: Sequence[Expr]) -> list[Expr]:
        """Where in the input each tap of the window lies."""
        at = positions(self.sizes)[self.lead :]
        return [
            o * s - p + t * d
            for o, t, s, p, d in zip(
                at, taps, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def read(self, other: Scalar) -> Scalar:
        """An element of the window (symbols r…), ``other`` outside of the input."""
        where = self.positions_of(positions(self.kernel, "r"))
        conditions: list[Scalar] = []
        for position, size in zip(where, self.space, strict=True):
            conditions += in_range(position, size)
        index = [*positions(self.sizes)[: self.lead], *where]
        return masked(all_of(conditions), cast(self.value.at(index), other.dtype), other)


def _max_windows(
    builder: Builder,
    value: Value,
    rank: int,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
) -> Windows:
    kernel = spread(kernel_size, rank)
    return Windows(
        value,
        builder.out.sizes,
        kernel,
        spread(stride, rank, kernel),
        spread(padding, rank),
        spread(dilation, rank),
    )


def _lower_max_pool(
    builder: Builder, rank: int, value: Value, *arguments: Sequence[IntLike]
) -> tuple[Value | None, Value | None]:
    windows = _max_windows(builder, value, rank, *arguments)
    dtype = compute_dtype(value.dtype)
    lowest = const(extreme(dtype, lowest=True), dtype)
    values = indices = None
    if builder.is_used(0):
        body = windows.read(lowest)
        wide = builder.reduce("maximum", body, windows.sizes, windows.kernel)
        values = converted(builder, wide)
    if builder.is_used(1):
        indices = _window_indices(builder, windows, windows.read(lowest))
    return values, indices


def _window_indices(builder: Builder, windows: Windows, body: Scalar) -> Value:
    """The row-major position in the input's space of each window's maximum."""
    best = builder.reduce("argmax", body, windows.sizes, windows.kernel, name="tap")
    i64 = dtypes.int64
    total: Scalar = const(0, i64)
    strides = contiguous_strides(windows.kernel)
    space_strides = contiguous_strides(windows.space)
    starts = windows.positions_of([ZERO] * len(windows.kernel))
    for k, start in enumerate(starts):
        tap = apply("floor_divide", best.body, cast(Index(strides[k]), i64))
        tap = apply("remainder", tap, cast(Index(windows.kernel[k]), i64))
        offset = apply("mul", tap, cast(Index(windows.dilation[k]), i64))
        # A window of lowest values gives its first tap, maybe in the padding: PyTorch's is inside.
        position = apply("maximum", apply("add", Index(start), offset), const(0, i64))
        total = apply("add", total, apply("mul", position, cast(Index(space_strides[k]), i64)))
    return builder.pointwise(total, windows.sizes, name="indices")


@lowers(aten.max_pool2d_with_indices.default)
def lower_max_pool2d(
    builder: Builder,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    dilation: Sequence[IntLike] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value | None, Value | None]:
    return _lower_max_pool(builder, 2, self, kernel_size, stride, padding, dilation)


@lowers(aten.max_pool3d_with_indices.default)
def lower_max_pool3d(
    builder: Builder,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    dilation: Sequence[IntLike] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value | None, Value | None]:
    return _lower_max_pool(builder, 3, self, kernel_size, stride, padding, dilation)


@lowers(aten.max_pool2d_with_indices_backward.default)
def lower_max_pool2d_backward(
    builder: Builder,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """Σ of the gradients of those windows over an element whose maximum it is (a gather)."""
    kernel = spread(kernel_size, 2)
    steps, pads, dilations = (
        spread(stride, 2, kernel),
        spread(padding, 2),
        spread(dilation, 2),
    )
    out = positions(self.sizes)
    lead, space = list(out[:-2]), out[-2:]
    # Windows o over position p have 0 ≤ p + padding − o·stride ≤ (kernel − 1)·dilation.
    reach = tuple(
        ceildiv((k - 1) * d + 1, s) for k, s, d in zip(kernel, steps, dilations, strict=True)
    )
    taps = positions(reach, "r")
    index: list[Expr] = lead
    conditions: list[Scalar] = []
    for k in range(2):
        window = (space[k] + pads[k]) // steps[k] - taps[k]
        conditions += in_range(window, grad_output.sizes[len(out) - 2 + k])
        index = [*index, window]
    flat = space[0] * self.sizes[-1] + space[1]
    dtype = compute_dtype(grad_output.dtype)
    zero = const(0, dtype)
    chosen = apply("eq", indices.at(index), Index(flat))
    grad = apply("where", chosen, cast(grad_output.at(index), dtype), zero)
    body = masked(all_of(conditions), grad, zero)
    return converted(builder, builder.reduce("sum", body, self.sizes, reach))


def _lower_avg_pool(
    builder: Builder,
    rank: int,
    value: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    kernel = spread(kernel_size, rank)
    ones = spread([1], rank)
    steps, pads = spread(stride, rank, kernel), spread(padding, rank)
    sizes = builder.out.sizes
    windows = Windows(value, sizes, kernel, steps, pads, ones)
    dtype = compute_dtype(value.dtype)
    if not dtype.is_float:
        raise NotLowered(f"average pooling of {dtype.name}")
    total = builder.reduce("sum", windows.read(const(0, dtype)), sizes, kernel, name="sum")
    divisor = _divisor(windows, count_include_pad)
    if divisor_override is not None:
        divisor = const(divisor_override, dtypes.int64)
    body = apply("div", total.body, cast(divisor, dtype))
    return builder.pointwise(cast(body, builder.out.dtype), sizes)


def _divisor(windows: Windows, count_include_pad: bool) -> Scalar:
    """Elements of each window: inside the padded input, or inside the input."""
    i64 = dtypes.int64
    count: Scalar = const(1, i64)
    starts = windows.positions_of([ZERO] * len(windows.kernel))
    for k, start in enumerate(starts):
        pad = windows.padding[k] if count_include_pad else ZERO
        high = apply("minimum", Index(start + windows.kernel[k]), Index(windows.space[k] + pad))
        low = Index(start) if count_include_pad else apply("maximum", Index(start), const(0, i64))
        count = apply("mul", count, apply("sub", high, low))
    return count


@lowers(aten.avg_pool2d.default)
def lower_avg_pool2d(builder: Builder, self: Value, *arguments: object) -> Value:
    return _lower_avg_pool(builder, 2, self, *arguments)  # type: ignore[arg-type]


@lowers(aten.avg_pool3d.default)
def lower_avg_pool3d(builder: Builder, self: Value, *arguments: object) -> Value:
    return _lower_avg_pool(builder, 3, self, *arguments)  # type: ignore[arg-type]


def _lower_adaptive(builder: Builder, value: Value, rank: int) -> Value:
    """Window i covers ⌊i·in/out⌋ to ⌈(i+1)·in/out⌉; masked to the longest window."""
    sizes = builder.out.sizes
    lead = value.rank - rank
    at = positions(sizes)[lead:]
    dtype = compute_dtype(value.dtype)
    starts, lengths, reach = [], [], []
    for o, size_in, size_out in zip(at, value.sizes[lead:], sizes[lead:], strict=True):
        if (size_in % size_out) is ZERO:
            step = size_in // size_out
            starts.append(o * step)
            lengths.append(step)
            reach.append(step)
        else:
            start = (o * size_in) // size_out
            starts.append(start)
            lengths.append(ceildiv((o + 1) * size_in, size_out) - start)
            reach.append(ceildiv(size_in, size_out) + 1)
    taps = positions(reach, "r")
    conditions: list[Scalar] = []
    for tap, length, longest in zip(taps, lengths, reach, strict=True):
        if length is not longest:
            conditions.append(apply("lt", Index(tap), Index(length)))
    index = [*positions(sizes)[:lead], *(s + t for s, t in zip(starts, taps, strict=True))]
    body = masked(all_of(conditions), cast(value.at(index), dtype), const(0, dtype))
    total = builder.reduce("sum", body, sizes, reach, name="sum")
    count: Scalar = const(1, dtypes.int64)
    for length in lengths:
        count = apply("mul", count, Index(length))
    average = apply("div", total.body, cast(count, dtype))
    return builder.pointwise(cast(average, builder.out.dtype), sizes)


@lowers(aten._adaptive_avg_pool2d.default)
def lower_adaptive_avg_pool2d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> Value:
    return _lower_adaptive(builder, self, 2)


@lowers(aten._adaptive_avg_pool3d.default)
def lower_adaptive_avg_pool3d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> Value:
    return _lower_adaptive(builder, self, 3)
