"""Pooling as reductions over windows, and its gradients.

Source: ATen ``max_pool2d_with_indices``, ``avg_pool2d``, ``fractional_max_pool2d``, ….
Gradients are gathered: each input element sums over the windows that contain it.
Shapes: input [N, C, *space] or [C, *space].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.folding import fold
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, as_expr, ceildiv, contiguous_strides, product
from .builder import Builder, masked
from .promotion import compute_dtype, rounded_to
from .reductions import converted, count_scalar
from .registry import LoweringFunction, NotLowered, lowers
from .scattering import scatter
from .value import IndexLike, Value, all_of, has_no_elements, in_range, positions, reshape, zeros

aten = torch.ops.aten
Window = tuple[Expr, ...]


def spread(values: Sequence[IntLike], rank: int, default: Window = ()) -> Window:
    """One entry per space dimension from ATen's short forms."""
    entries = tuple(as_expr(v) for v in values)
    if not entries:
        return default
    return entries * rank if len(entries) == 1 else entries


class PoolingWindows:
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
        """The position in the input of each tap of the window."""
        at = positions(self.sizes)[self.lead :]
        return [
            o * s - p + t * d
            for o, t, s, p, d in zip(
                at, taps, self.stride, self.padding, self.dilation, strict=True
            )
        ]

    def read(self, other: Scalar) -> Scalar:
        """An element of the window (symbols r…), ``other`` outside of the input."""
        places = self.positions_of(positions(self.kernel, "r"))
        conditions: list[Scalar] = []
        for position, size in zip(places, self.space, strict=True):
            conditions += in_range(position, size)
        index = [*positions(self.sizes)[: self.lead], *places]
        return masked(all_of(conditions), cast(self.value.at(index), other.dtype), other)


def lower_max_pool(
    builder: Builder,
    value: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    dilation: Sequence[IntLike] = (1,),
    ceil_mode: bool = False,
    *,
    rank: int,
) -> tuple[Value | None, Value | None]:
    """(the largest element of each window, its row-major position in the input's space).

    Windows over the last ``rank`` dimensions; padding never wins, NaN does. ``stride`` is the
    kernel's size if empty. Only results that are read are made.
    """
    kernel = spread(kernel_size, rank)
    steps, pads = spread(stride, rank, kernel), spread(padding, rank)
    windows = PoolingWindows(value, builder.out.sizes, kernel, steps, pads, spread(dilation, rank))
    dtype = compute_dtype(value.dtype)
    lowest = const(dtype.lowest, dtype)
    values = indices = None
    if builder.is_used(0):
        wide = builder.reduce("maximum", windows.read(lowest), windows.sizes, windows.kernel)
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
        total += entry * Index(stride)
    return total


def _window_indices(builder: Builder, windows: PoolingWindows, body: Scalar) -> Value:
    """The row-major position in the input's space of each window's maximum."""
    best = builder.reduce("argmax", body, windows.sizes, windows.kernel, name="tap")
    taps = unravel(best.body, windows.kernel)
    starts = windows.positions_of([ZERO] * len(windows.kernel))
    places = []
    for start, tap, dilation in zip(starts, taps, windows.dilation, strict=True):
        position = Index(start) + tap * Index(dilation)
        # A window of lowest values gives its first tap, maybe in the padding: PyTorch's is inside.
        places.append(apply("maximum", position, 0))
    return builder.pointwise(ravel(places, windows.space), windows.sizes, name="indices")


def lower_avg_pool(
    builder: Builder,
    value: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike] = (),
    padding: Sequence[IntLike] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    rank: int,
) -> Value:
    """The mean of each window over the last ``rank`` dimensions.

    The divisor is ``divisor_override``, or the number of elements in the window: with
    ``count_include_pad`` those of the padding too. 16-bit floats are summed in float32; integer
    means are truncated. Raises NotLowered: for bool.
    """
    kernel = spread(kernel_size, rank)
    ones = spread([1], rank)
    steps, pads = spread(stride, rank, kernel), spread(padding, rank)
    sizes = builder.out.sizes
    windows = PoolingWindows(value, sizes, kernel, steps, pads, ones)
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


def window_divisor(
    windows: PoolingWindows, count_include_pad: bool, window: Sequence[Expr]
) -> Scalar:
    """Elements of a window: inside the padded input, or inside the input."""
    i64 = dtypes.int64
    count: Scalar = const(1, i64)
    for k, position in enumerate(window):
        start = position * windows.stride[k] - windows.padding[k]
        pad = windows.padding[k] if count_include_pad else ZERO
        high = apply("minimum", Index(start + windows.kernel[k]), Index(windows.space[k] + pad))
        low = Index(start) if count_include_pad else apply("maximum", Index(start), 0)
        count *= high - low
    return fold(count)


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

    def count(self) -> Scalar:
        """The number of elements of a window, int64."""
        total: Scalar = const(1, dtypes.int64)
        for length in self.lengths:
            total *= Index(length)
        return total

    def read(self, other: Scalar) -> Scalar:
        """An element of the window, ``other`` past its end."""
        taps = positions(self.reach, "r")
        conditions: list[Scalar] = []
        index = list(positions(self.sizes)[: self.lead])
        for k, (start, tap) in enumerate(zip(self.starts, taps, strict=True)):
            if self.lengths[k] is not self.reach[k]:
                conditions.append(Index(tap) < Index(self.lengths[k]))
            index.append(start + tap)
        return masked(all_of(conditions), cast(self.value.at(index), other.dtype), other)


def lower_adaptive_avg_pool(
    builder: Builder, value: Value, output_size: Sequence[IntLike], *, rank: int
) -> Value:
    """The means of windows that divide the last ``rank`` dimensions into ``output_size`` parts.

    Window i covers ⌊i · in / out⌋ to ⌈(i + 1) · in / out⌉ of a dimension.
    """
    sizes = builder.out.sizes
    dtype = compute_dtype(value.dtype)
    windows = AdaptiveWindows(value, sizes, rank)
    if value.is_empty or has_no_elements(sizes):
        return zeros(sizes, value.dtype)
    body = windows.read(const(0, dtype))
    total = builder.reduce("sum", body, sizes, windows.reach, name="sum")
    count = cast(windows.count(), dtype)
    return builder.pointwise(cast(total.body / count, builder.out.dtype), sizes)


def lower_adaptive_max_pool(
    builder: Builder, value: Value, output_size: Sequence[IntLike], *, rank: int
) -> tuple[Value | None, Value | None]:
    """(the largest element of each adaptive window, its row-major position in the input's space).

    The windows are those of `lower_adaptive_avg_pool`.
    """
    sizes = builder.out.sizes
    dtype = compute_dtype(value.dtype)
    windows = AdaptiveWindows(value, sizes, rank)
    body = windows.read(const(dtype.lowest, dtype))
    values = converted(builder, builder.reduce("maximum", body, sizes, windows.reach))
    if not builder.is_used(1):
        return values, None
    best = builder.reduce("argmax", body, sizes, windows.reach, name="tap")
    taps = unravel(best.body, windows.reach)
    places = [Index(s) + t for s, t in zip(windows.starts, taps, strict=True)]
    return values, builder.pointwise(ravel(places, windows.value.sizes[windows.lead :]), sizes)


def _gather_windows(
    builder: Builder,
    grad: Value,
    value: Value,
    kernel: Sequence[Expr],
    stride: Sequence[Expr],
    padding: Sequence[Expr],
    dilation: Sequence[Expr],
    term: Callable[[list[Expr], Scalar], Scalar],
) -> Value:
    """Σ over windows near each element of ``value`` of ``term(window index, gradient)``.

    Windows o over position p have 0 ≤ p + padding − o·stride ≤ (kernel − 1)·dilation.
    """
    rank = len(kernel)
    out = positions(value.sizes)
    lead, space = list(out[: value.rank - rank]), out[value.rank - rank :]
    reach = tuple(
        ceildiv((k - 1) * d + 1, s) for k, s, d in zip(kernel, stride, dilation, strict=True)
    )
    taps = positions(reach, "r")
    index: list[Expr] = list(lead)
    conditions: list[Scalar] = []
    for k in range(rank):
        window = (space[k] + padding[k]) // stride[k] - taps[k]
        conditions += in_range(window, grad.sizes[len(lead) + k])
        distance = space[k] + padding[k] - window * stride[k]
        conditions += in_range(distance, (kernel[k] - 1) * dilation[k] + 1)
        index.append(window)
    dtype = compute_dtype(grad.dtype)
    body = term(index, cast(grad.at(index), dtype))
    body = masked(all_of(conditions), body, 0)
    return converted(builder, builder.reduce("sum", body, value.sizes, reach))


def lower_max_pool_backward(
    builder: Builder,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
    ceil_mode: bool,
    indices: Value,
    *,
    rank: int,
) -> Value:
    """Each element of the input: Σ of the gradients of the windows whose maximum it was.

    ``indices`` are those of `lower_max_pool`.
    """
    kernel = spread(kernel_size, rank)
    space = positions(self.sizes)[self.rank - rank :]
    flat = space[0]
    for size, position in zip(self.sizes[self.rank - rank + 1 :], space[1:], strict=True):
        flat = flat * size + position

    def term(window: list[Expr], grad: Scalar) -> Scalar:
        return where(apply("eq", indices.at(window), Index(flat)), grad, 0)

    steps, pads = spread(stride, rank, kernel), spread(padding, rank)
    dilations = spread(dilation, rank)
    return _gather_windows(builder, grad_output, self, kernel, steps, pads, dilations, term)


def lower_avg_pool_backward(
    builder: Builder,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    rank: int,
) -> Value:
    """Each element of the input: Σ of gradient / divisor of the windows that contain it."""
    kernel = spread(kernel_size, rank)
    steps, pads, ones = spread(stride, rank, kernel), spread(padding, rank), spread([1], rank)
    forward = PoolingWindows(self, grad_output.sizes, kernel, steps, pads, ones)

    def term(window: list[Expr], grad: Scalar) -> Scalar:
        if divisor_override is not None:
            return grad / divisor_override
        divisor = window_divisor(forward, count_include_pad, window[forward.lead :])
        return grad / cast(divisor, grad.dtype)

    return _gather_windows(builder, grad_output, self, kernel, steps, pads, ones, term)


def lower_adaptive_avg_pool_backward(
    builder: Builder, grad_output: Value, value: Value, *, rank: int
) -> Value:
    """Each element of the input: Σ of gradient / length of the windows that contain it.

    Windows over position p run from ⌊p·out/in⌋ to ⌈(p+1)·out/in⌉: the same rule, reversed.
    """
    windows = AdaptiveWindows(grad_output, value.sizes, rank)
    forward = AdaptiveWindows(value, grad_output.sizes, rank)
    dtype = compute_dtype(grad_output.dtype)
    share = cast(grad_output.body, dtype) / cast(forward.count(), dtype)
    windows.value = builder.pointwise(share, grad_output.sizes, name="share")
    body = windows.read(const(0, dtype))
    return converted(builder, builder.reduce("sum", body, value.sizes, windows.reach))


def _start(
    sample: Scalar, at: Expr, size_in: Expr, size_out: Expr, kernel: Expr, dtype: DType
) -> Scalar:
    """⌊(at + sample) · α⌋ − ⌊sample · α⌋ with α = (in − kernel) / (out − 1); the last at the end.

    Rounded to ``dtype`` after each operation, as PyTorch computes it.
    """
    wide = compute_dtype(dtype)

    def rounded(scalar: Scalar) -> Scalar:
        return rounded_to(scalar, dtype)

    def number(expr: Expr) -> Scalar:
        return rounded(cast(Index(expr), wide))

    def floor(scalar: Scalar) -> Scalar:
        return cast(apply("trunc", scalar), dtypes.int64)

    end = Index(size_in - kernel)
    if size_out is ONE:
        return end
    alpha = rounded(number(size_in - kernel) / number(size_out - 1))
    sample = cast(sample, wide)
    moved = rounded(rounded(number(at) + sample) * alpha)
    start = floor(moved) - floor(rounded(sample * alpha))
    is_last = apply("eq", Index(at), Index(size_out - 1))
    return where(is_last, end, start)


def lower_fractional_max_pool(
    builder: Builder,
    value: Value,
    kernel_size: Sequence[IntLike],
    output_size: Sequence[IntLike],
    random_samples: Value,
    *,
    rank: int,
) -> tuple[Value | None, Value | None]:
    """(the largest element of each window, its row-major position in the input's space).

    Windows begin where ``random_samples`` put them: numbers of [0, 1) for each image, channel and
    dimension of space, [N, C, rank].
    """
    sizes = builder.out.sizes
    if has_no_elements(sizes):
        return zeros(sizes, value.dtype), zeros(sizes, dtypes.int64)
    kernel = spread(kernel_size, rank)
    lead = value.rank - rank
    index = positions(sizes)
    space = value.sizes[lead:]
    starts = []
    for k in range(rank):
        # Of two dimensions the first sample is the last one's; of three each has its own.
        which = rank - 1 - k if rank == 2 else k
        batch = [ZERO] if lead == 1 else []
        sample = random_samples.at([*batch, *index[:lead], ZERO + which])
        start = _start(sample, index[lead + k], space[k], sizes[lead + k], kernel[k], value.dtype)
        starts.append(start)
    taps = positions(kernel, "r")
    places: list[IndexLike] = [start + Index(tap) for start, tap in zip(starts, taps, strict=True)]
    dtype = compute_dtype(value.dtype)
    body = cast(value.at([*index[:lead], *places]), dtype)
    values = indices = None
    if builder.is_used(0):
        values = converted(builder, builder.reduce("maximum", body, sizes, kernel))
    if builder.is_used(1):
        best = builder.reduce("argmax", body, sizes, kernel, name="tap")
        chosen = [s + t for s, t in zip(starts, unravel(best.body, kernel), strict=True)]
        indices = builder.pointwise(ravel(chosen, space), sizes, name="indices")
    return values, indices


def lower_fractional_max_pool_backward(
    builder: Builder,
    grad: Value,
    value: Value,
    kernel_size: Sequence[IntLike],
    output_size: Sequence[IntLike],
    indices: Value,
    *,
    rank: int,
) -> Value:
    """Each gradient added to the input's element at its index.

    Raises NotLowered: where `scatter` does.
    """
    lead = value.rank - rank
    initial = zeros((*value.sizes[:lead], product(value.sizes[lead:])), value.dtype)
    places: list[IndexLike] = [*positions(grad.sizes)[:lead], indices.body]
    total = scatter(builder, initial, grad.sizes, places, grad.body, accumulate=True)
    return reshape(total, value.sizes)


_LOWERINGS: dict[str, LoweringFunction] = {
    "max_pool{}d_with_indices": lower_max_pool,
    "max_pool{}d_with_indices_backward": lower_max_pool_backward,
    "avg_pool{}d": lower_avg_pool,
    "avg_pool{}d_backward": lower_avg_pool_backward,
    "_adaptive_avg_pool{}d": lower_adaptive_avg_pool,
    "_adaptive_avg_pool{}d_backward": lower_adaptive_avg_pool_backward,
    "adaptive_max_pool{}d": lower_adaptive_max_pool,
    "fractional_max_pool{}d": lower_fractional_max_pool,
    "fractional_max_pool{}d_backward": lower_fractional_max_pool_backward,
}
for _name, _function in _LOWERINGS.items():
    for _rank in (2, 3):
        lowers(getattr(aten, _name.format(_rank)).default)(partial(_function, rank=_rank))
