"""Pooling as reductions over windows. Source: ATen ``max_pool2d_with_indices``, ``avg_pool2d``, ….

Shapes: input [N, C, *space] or [C, *space].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dtypes
from ..ir.folding import fold
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, as_expr, ceildiv, contiguous_strides
from .builder import Builder, masked
from .convolution import all_of, in_range
from .promotion import compute_dtype
from .reductions import converted, count_scalar
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


def _lower_max_pool(
    builder: Builder,
    rank: int,
    value: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    dilation: Sequence[IntLike] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value | None, Value | None]:
    kernel = spread(kernel_size, rank)
    steps, pads = spread(stride, rank, kernel), spread(padding, rank)
    windows = Windows(value, builder.out.sizes, kernel, steps, pads, spread(dilation, rank))
    dtype = compute_dtype(value.dtype)
    lowest = const(dtype.lowest, dtype)
    values = indices = None
    if builder.is_used(0):
        body = windows.read(lowest)
        wide = builder.reduce("maximum", body, windows.sizes, windows.kernel)
        values = converted(builder, wide)
    if builder.is_used(1):
        indices = _window_indices(builder, windows, windows.read(lowest))
    return values, indices


def unravel(flat: Scalar, sizes: Sequence[Expr]) -> list[Scalar]:
    """The index of a row-major position in a window, computed from data.

    A window is small, so in 32 bits: GPUs divide 64-bit integers in dozens of instructions, and a
    driver dies of some of them (`codegen.hardening.quirks`).
    """
    narrow = cast(flat, dtypes.int32)
    strides = contiguous_strides(tuple(sizes))
    entries = []
    for k, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        entry = narrow
        if stride is not ONE:
            entry = apply("trunc_divide", entry, count_scalar(stride, dtypes.int32))
        if k:
            entry = apply("fmod", entry, count_scalar(size, dtypes.int32))
        entries.append(cast(entry, dtypes.int64))
    return entries


def ravel(index: Sequence[Scalar], sizes: Sequence[Expr]) -> Scalar:
    """The row-major position of an index computed from data."""
    total: Scalar = const(0, dtypes.int64)
    for entry, stride in zip(index, contiguous_strides(tuple(sizes)), strict=True):
        total = apply("add", total, apply("mul", entry, Index(stride)))
    return total


def _window_indices(builder: Builder, windows: Windows, body: Scalar) -> Value:
    """The row-major position in the input's space of each window's maximum."""
    best = builder.reduce("argmax", body, windows.sizes, windows.kernel, name="tap")
    taps = unravel(best.body, windows.kernel)
    starts = windows.positions_of([ZERO] * len(windows.kernel))
    where = []
    for start, tap, dilation in zip(starts, taps, windows.dilation, strict=True):
        position = apply("add", Index(start), apply("mul", tap, Index(dilation)))
        # A window of lowest values gives its first tap, maybe in the padding: PyTorch's is inside.
        where.append(apply("maximum", position, const(0, dtypes.int64)))
    return builder.pointwise(ravel(where, windows.space), windows.sizes, name="indices")


@lowers(aten.max_pool2d_with_indices.default)
def lower_max_pool2d(
    builder: Builder, self: Value, *arguments: Any
) -> tuple[Value | None, Value | None]:
    """(the largest element of each window, its row-major position in the input's space).

    Windows over the last two dimensions; padding never wins, NaN does. ``kernel_size``, ``stride``
    (the kernel's size if empty), ``padding``, ``dilation`` and ``ceil_mode`` follow ``self``. Only
    results that are read are made.
    """
    return _lower_max_pool(builder, 2, self, *arguments)


@lowers(aten.max_pool3d_with_indices.default)
def lower_max_pool3d(
    builder: Builder, self: Value, *arguments: Any
) -> tuple[Value | None, Value | None]:
    """`lower_max_pool2d` for windows over the last three dimensions."""
    return _lower_max_pool(builder, 3, self, *arguments)


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
    if dtype is dtypes.bool_:
        raise NotLowered("average pooling of bool")
    total = builder.reduce("sum", windows.read(const(0, dtype)), sizes, kernel, name="sum")
    divisor = window_divisor(windows, count_include_pad, positions(sizes)[windows.lead :])
    if divisor_override is not None:
        divisor = const(divisor_override, dtypes.int64)
    division = "div" if dtype.is_float else "trunc_divide"
    body = apply(division, total.body, cast(divisor, dtype))
    return builder.pointwise(cast(body, builder.out.dtype), sizes)


def window_divisor(windows: Windows, count_include_pad: bool, window: Sequence[Expr]) -> Scalar:
    """Elements of a window: inside the padded input, or inside the input."""
    i64 = dtypes.int64
    count: Scalar = const(1, i64)
    for k, position in enumerate(window):
        start = position * windows.stride[k] - windows.padding[k]
        pad = windows.padding[k] if count_include_pad else ZERO
        high = apply("minimum", Index(start + windows.kernel[k]), Index(windows.space[k] + pad))
        low = Index(start) if count_include_pad else apply("maximum", Index(start), const(0, i64))
        count = apply("mul", count, apply("sub", high, low))
    return fold(count)


@lowers(aten.avg_pool2d.default)
def lower_avg_pool2d(builder: Builder, self: Value, *arguments: Any) -> Value:
    """The mean of each window over the last two dimensions.

    The divisor is ``divisor_override``, or the number of elements in the window: with
    ``count_include_pad`` those of the padding too. 16-bit floats are summed in float32; integer
    means are truncated. Raises NotLowered: for bool.
    """
    return _lower_avg_pool(builder, 2, self, *arguments)


@lowers(aten.avg_pool3d.default)
def lower_avg_pool3d(builder: Builder, self: Value, *arguments: Any) -> Value:
    """`lower_avg_pool2d` for windows over the last three dimensions."""
    return _lower_avg_pool(builder, 3, self, *arguments)


class AdaptiveWindows:
    """Window i covers ⌊i·in/out⌋ to ⌈(i+1)·in/out⌉; masked to the longest window.

    Attributes:
        reach: sizes of the longest window, symbols r….
        lengths: sizes of each window.
        index: the element of the input at tap r of window i.
    """

    def __init__(self, value: Value, sizes: tuple[Expr, ...], rank: int) -> None:
        lead = value.rank - rank
        at = positions(sizes)[lead:]
        self.value, self.sizes, self.lead = value, sizes, lead
        self.starts: list[Expr] = []
        self.lengths: list[Expr] = []
        self.reach: list[Expr] = []
        for o, size_in, size_out in zip(at, value.sizes[lead:], sizes[lead:], strict=True):
            size_out = ONE if size_out is ZERO else size_out  # of no windows none is read
            if (size_in % size_out) is ZERO:
                step = size_in // size_out
                self.starts.append(o * step)
                self.lengths.append(step)
                self.reach.append(step)
            else:
                start = (o * size_in) // size_out
                self.starts.append(start)
                self.lengths.append(ceildiv((o + 1) * size_in, size_out) - start)
                self.reach.append(ceildiv(size_in, size_out) + 1)

    def read(self, other: Scalar) -> Scalar:
        """An element of the window, ``other`` past its end."""
        taps = positions(self.reach, "r")
        conditions: list[Scalar] = []
        index = list(positions(self.sizes)[: self.lead])
        for k, (start, tap) in enumerate(zip(self.starts, taps, strict=True)):
            if self.lengths[k] is not self.reach[k]:
                conditions.append(apply("lt", Index(tap), Index(self.lengths[k])))
            index.append(start + tap)
        return masked(all_of(conditions), cast(self.value.at(index), other.dtype), other)


def _lower_adaptive(builder: Builder, value: Value, rank: int) -> Value:
    sizes = builder.out.sizes
    dtype = compute_dtype(value.dtype)
    windows = AdaptiveWindows(value, sizes, rank)
    if value.is_empty or any(size is ZERO for size in sizes):
        return Value(value.dtype, sizes, const(0, value.dtype))
    body = windows.read(const(0, dtype))
    total = builder.reduce("sum", body, sizes, windows.reach, name="sum")
    count: Scalar = const(1, dtypes.int64)
    for length in windows.lengths:
        count = apply("mul", count, Index(length))
    average = apply("div", total.body, cast(count, dtype))
    return builder.pointwise(cast(average, builder.out.dtype), sizes)


@lowers(aten._adaptive_avg_pool2d.default)
def lower_adaptive_avg_pool2d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> Value:
    """The means of windows that divide the last two dimensions into ``output_size`` parts.

    Window i covers ⌊i · in / out⌋ to ⌈(i + 1) · in / out⌉ of a dimension.
    """
    return _lower_adaptive(builder, self, 2)


@lowers(aten._adaptive_avg_pool3d.default)
def lower_adaptive_avg_pool3d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> Value:
    """`lower_adaptive_avg_pool2d` for the last three dimensions."""
    return _lower_adaptive(builder, self, 3)


def _lower_adaptive_max(
    builder: Builder, value: Value, rank: int
) -> tuple[Value | None, Value | None]:
    sizes = builder.out.sizes
    dtype = compute_dtype(value.dtype)
    windows = AdaptiveWindows(value, sizes, rank)
    body = windows.read(const(dtype.lowest, dtype))
    values = converted(builder, builder.reduce("maximum", body, sizes, windows.reach))
    if not builder.is_used(1):
        return values, None
    best = builder.reduce("argmax", body, sizes, windows.reach, name="tap")
    taps = unravel(best.body, windows.reach)
    where = [apply("add", Index(s), t) for s, t in zip(windows.starts, taps, strict=True)]
    return values, builder.pointwise(ravel(where, windows.value.sizes[windows.lead :]), sizes)


@lowers(aten.adaptive_max_pool2d.default)
def lower_adaptive_max_pool2d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> tuple[Value | None, Value | None]:
    """(the largest element of each adaptive window, its row-major position in the input's space).

    The windows are those of `lower_adaptive_avg_pool2d`.
    """
    return _lower_adaptive_max(builder, self, 2)


@lowers(aten.adaptive_max_pool3d.default)
def lower_adaptive_max_pool3d(
    builder: Builder, self: Value, output_size: Sequence[IntLike]
) -> tuple[Value | None, Value | None]:
    """`lower_adaptive_max_pool2d` for the last three dimensions."""
    return _lower_adaptive_max(builder, self, 3)
