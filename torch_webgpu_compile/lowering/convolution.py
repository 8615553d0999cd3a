"""Convolutions and their gradients as contractions. Source: ATen ``convolution(_backward)``.

Shapes: input [N, C, *space], weight [O, C/groups, *kernel]; of a transposed convolution the weight
is [C, O/groups, *kernel].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.depthwise_nodes import (
    DepthwiseConvolution,
    DepthwiseWeightGradient,
    Windows,
    tiled_windows,
)
from ..ir.nodes import Contraction
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..ir.spaces import iteration_symbols
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    IntLike,
    as_expr,
    ceildiv,
    contiguous_strides,
    delinearize,
    is_less,
    is_nonnegative,
    linearize,
    magnitude,
    product,
)
from .builder import Builder, masked
from .matmul import add_scaled
from .promotion import compute_dtype
from .reductions import converted, summed
from .registry import NotLowered, lowers
from .value import Value, channelwise, has_no_elements, positions, zeros

aten = torch.ops.aten

# From this many output positions per image on, an image is a batch of the contraction: its columns
# are then contiguous in memory. Below it, images share the columns so that tiles are full.
BATCHED_POSITIONS = 256

# Channels of a result of which a tile of a contraction is mostly empty; how many times as many each
# is made of, at least, where what taps add to it is stored, and how many times as much as what is
# read that may be. On an H200 the gradient of 16 × 3 × 224² images by 64 filters of 7 × 7, with
# strides of 2, takes 7.2 ms with a row for each channel, 0.25 with a row for each tap of one.
_FEW_CHANNELS, _LEAST_OF_CHANNELS, _MOST_STORED = 8, 4, 8

# Input channels of a group that a depthwise convolution's kernel goes through one by one.
_MOST_DEPTH = 8


@dataclass(frozen=True)
class Geometry:
    """The hyperparameters of a convolution, one entry per space dimension."""

    stride: tuple[Expr, ...]
    padding: tuple[Expr, ...]
    dilation: tuple[Expr, ...]
    groups: int
    transposed: bool

    @staticmethod
    def of(rank: int, *lists: Sequence[IntLike], groups: int, transposed: bool) -> Geometry:
        """ATen's stride, padding and dilation, where a list of one entry is for all dimensions."""

        def full(values: Sequence[IntLike]) -> tuple[Expr, ...]:
            entries = [as_expr(v) for v in values]
            return tuple(entries * rank if len(entries) == 1 else entries)

        stride, padding, dilation = map(full, lists)
        return Geometry(stride, padding, dilation, int(groups), bool(transposed))

    def tiled(self, kernel: Sequence[Expr]) -> Windows | None:
        """Its windows, if a kernel that keeps tiles of images can go through them."""
        return tiled_windows(kernel, self.stride, self.padding, self.dilation, self.transposed)

    def window(
        self, value: Value, lead: Sequence[Expr], at: Sequence[Expr], kernel: Sequence[Expr]
    ) -> Scalar:
        """What the result at ``at`` reads for the tap ``kernel``, 0 outside of the value."""
        read = self.read_transposed if self.transposed else self.read
        return read(value, lead, at, kernel)

    def read(
        self, value: Value, lead: Sequence[Expr], at: Sequence[Expr], kernel: Sequence[Expr]
    ) -> Scalar:
        """value[lead, at·stride − padding + kernel·dilation], 0 outside of it."""
        index, conditions = list(lead), []
        for k, (o, t) in enumerate(zip(at, kernel, strict=True)):
            position = o * self.stride[k] - self.padding[k] + t * self.dilation[k]
            conditions += in_range(position, value.sizes[len(lead) + k])
            index.append(position)
        return masked(all_of(conditions), value.at(index), 0)

    def read_transposed(
        self, value: Value, lead: Sequence[Expr], at: Sequence[Expr], kernel: Sequence[Expr]
    ) -> Scalar:
        """value[lead, (at + padding − kernel·dilation) / stride] where that is whole, else 0."""
        index, conditions = list(lead), []
        for k, (o, t) in enumerate(zip(at, kernel, strict=True)):
            shifted = o + self.padding[k] - t * self.dilation[k]
            position = shifted // self.stride[k]
            if self.stride[k] is not ONE:
                remainder = Index(shifted % self.stride[k])
                conditions.append(apply("eq", remainder, 0))
            conditions += in_range(position, value.sizes[len(lead) + k])
            index.append(position)
        return masked(all_of(conditions), value.at(index), 0)


def in_range(position: Expr, size: Expr) -> list[Scalar]:
    """Conditions for 0 ≤ position < size that are not always true."""
    conditions = []
    if not is_nonnegative(position):
        conditions.append(Index(position) >= 0)
    if not is_less(position, size):
        conditions.append(Index(position) < Index(size))
    return conditions


def all_of(conditions: Sequence[Scalar]) -> Scalar:
    """The conjunction; True of none."""
    total: Scalar = const(True, dtypes.bool_)
    for k, condition in enumerate(conditions):
        total = condition if k == 0 else total & condition
    return total


def _is_batched(positions_per_image: Expr) -> bool:
    count = magnitude(positions_per_image)
    return count is None or count >= BATCHED_POSITIONS


@dataclass(frozen=True)
class _Axes:
    """How (image, phases, group, column space) map to a contraction's symbols."""

    batch: tuple[Expr, ...]
    columns: tuple[Expr, ...]
    image: Expr
    phases: tuple[Expr, ...]
    group: Expr
    space: tuple[Expr, ...]


def _axes(images: Expr, groups: int, space: Sequence[Expr], phases: Sequence[Expr] = ()) -> _Axes:
    in_batch = images is not ONE and _is_batched(product(space))
    loops = (images if in_batch else ONE, *phases, as_expr(groups))
    batch = tuple(size for size in loops if size is not ONE)
    used = iter(positions(batch, "b"))
    image, *symbols, group = (ZERO if size is ONE else next(used) for size in loops)
    lead = [] if in_batch or images is ONE else [images]
    columns = (*lead, *space)
    column_symbols = list(positions(columns, "n"))
    if lead:
        image = column_symbols.pop(0)
    return _Axes(batch, columns, image, tuple(symbols), group, tuple(column_symbols))


@dataclass(frozen=True)
class _Phases:
    """A dimension of a transposed convolution, whose results are in groups by the taps they read.

    Result y reads tap t at (y + padding − t·dilation) / stride, where that is whole. That depends
    on y modulo the stride: there is a first tap, which numbers the group, and every ``stride``-th
    from it. Where the kernel has fewer taps than the stride, the other results read nothing.

    Attributes:
        kernel: the number of taps.
        count: of groups.
        taps: of a group, at most.
        size: results of a group.
    """

    stride: int
    padding: int
    dilation: int
    kernel: int
    count: int
    taps: int
    size: Expr

    @staticmethod
    def of(geometry: Geometry, k: int, kernel: Expr, size: Expr) -> _Phases | None:
        """Those of dimension ``k``; None where they are not known, or taps are in several groups.

        Args:
            size: of the result.
        """
        given = geometry.stride[k], geometry.padding[k], geometry.dilation[k], kernel
        if not all(value.is_constant for value in given):
            return None
        stride, padding, dilation, taps = map(int, given)
        if math.gcd(stride, dilation) > 1:
            return None
        count, most = min(stride, taps), -(-taps // stride)
        return _Phases(stride, padding, dilation, taps, count, most, ceildiv(size, stride))

    def tap(self, group: Expr, number: Expr) -> Expr:
        """The number of a group's tap among all; those from ``kernel`` on do not exist."""
        return group + number * self.stride

    def read(self, group: Expr, position: Expr, number: Expr) -> Expr:
        """Where a group's result reads for one of its taps, perhaps outside."""
        skipped = (group * self.dilation - self.padding) // self.stride
        return position - skipped - number * self.dilation

    def place(self, result: Expr) -> tuple[Expr, Expr]:
        """The group of a result, and the position there; groups from ``count`` on do not exist."""
        inverse = pow(self.dilation, -1, self.stride)
        group = (result + self.padding) % self.stride * inverse % self.stride
        return group, result // self.stride


def convolve(
    builder: Builder,
    input: Value,
    weight: Value,
    geometry: Geometry,
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str = "",
) -> Value:
    """The convolution without bias, of output ``sizes``, in ``dtype``."""
    images, _, *space = sizes
    kernel = weight.sizes[2:]
    in_channels = input.sizes[1] // geometry.groups
    out_channels = sizes[1] // geometry.groups
    inner = (in_channels, *kernel)
    if has_no_elements((*sizes, *inner)):
        return zeros(sizes, dtype)
    if dtype is dtypes.bool_:
        raise NotLowered("convolution of bool")
    windows = geometry.tiled(kernel)
    if windows is not None and _is_depthwise(geometry.groups, in_channels, out_channels, dtype):
        return _depthwise(builder, input, weight, geometry, windows, sizes, dtype, name)
    if not dtype.is_float or (geometry.groups > 1 and in_channels is ONE):
        return _reduced(builder, input, weight, geometry, sizes, dtype, name)
    phases = _phases(geometry, kernel, space) if geometry.transposed else ()
    if phases and geometry.groups == 1 and _makes_few_channels(input, sizes[1], kernel):
        return _by_taps(builder, input, weight, phases, sizes, dtype, name)
    if phases and any(step is not ONE for step in geometry.stride):
        return _in_phases(builder, input, weight, geometry, phases, sizes, dtype, name)
    axes = _axes(images, geometry.groups, space)
    (row,) = positions((out_channels,), "m")
    channel, *taps = positions(inner, "k")
    in_channel = axes.group * in_channels + channel
    out_channel = axes.group * out_channels + row
    channels = [in_channel, row] if geometry.transposed else [out_channel, channel]
    lhs = weight.at([*channels, *taps])
    rhs = geometry.window(input, [axes.image, in_channel], axes.space, taps)
    node = _contraction(axes, out_channels, inner, lhs, rhs, dtype, out_channel)
    return builder.contract(dtype, sizes, node, name=name)


def _contraction(
    axes: _Axes,
    rows: Expr,
    inner: tuple[Expr, ...],
    weight: Scalar,
    window: Scalar,
    dtype: DType,
    channel: Expr,
) -> Contraction:
    """The products of a weight's and a window's elements, summed into a channel of the result."""
    wide = compute_dtype(dtype)
    return Contraction(
        output="",
        batch=axes.batch,
        rows=(rows,),
        columns=axes.columns,
        inner=inner,
        lhs=cast(weight, wide),
        rhs=cast(window, wide),
        index=(axes.image, channel, *axes.space),
    )


def _phases(geometry: Geometry, kernel: Sequence[Expr], space: Sequence[Expr]) -> Sequence[_Phases]:
    """Those of each dimension of a transposed convolution; none where one has none."""
    dims = enumerate(zip(kernel, space, strict=True))
    found = [_Phases.of(geometry, k, taps, size) for k, (taps, size) in dims]
    known = [phases for phases in found if phases is not None]
    return known if len(known) == len(found) else ()


def _makes_few_channels(input: Value, channels: Expr, kernel: Sequence[Expr]) -> bool:
    """Whether a convolution's result has few channels, each made of many, for windows that fit.

    ``kernel``: its taps, whose products with all of a channel's weights are to be stored.
    """
    made, read = magnitude(channels), magnitude(input.sizes[1])
    taps = product(kernel)
    if made is None or read is None or not taps.is_constant:
        return False
    is_worth = int(taps) > 1 and _LEAST_OF_CHANNELS * made <= read
    return made <= _FEW_CHANNELS and is_worth and made * int(taps) <= _MOST_STORED * read


def _by_taps(
    builder: Builder,
    input: Value,
    weight: Value,
    phases: Sequence[_Phases],
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str,
) -> Value:
    """A transposed convolution that makes few channels: what each tap adds, then their sums.

    A contraction over channels alone has a row for each tap of each channel, and plain matrices as
    operands. With channels as rows, tiles would be mostly empty.
    """
    images, out_channels = sizes[:2]
    kernel = weight.sizes[2:]
    read_space = input.sizes[2:]
    rows = (out_channels, *kernel)
    axes = _axes(images, 1, read_space)
    (channel,) = positions((input.sizes[1],), "k")
    (row,) = positions((product(rows),), "m")
    strides = contiguous_strides(rows)
    lhs = weight.at([channel, *delinearize(row, rows)])
    rhs = input.at([axes.image, channel, *axes.space])
    node = _contraction(axes, product(rows), (input.sizes[1],), lhs, rhs, dtype, row)
    wide = compute_dtype(dtype)
    stored = (images, product(rows), *read_space)
    name_of_taps = f"{name}_taps" if name else "taps"
    products = builder.contract(wide, stored, node, name=name_of_taps)
    image, out_channel, *results = positions(sizes)
    numbers = positions([as_expr(found.taps) for found in phases], "r")
    taps, at = [], []
    inside: list[Scalar] = []
    for found, result, number, size in zip(phases, results, numbers, read_space, strict=True):
        group, position = found.place(result)
        taps.append(found.tap(group, number))
        at.append(found.read(group, position, number))
        inside += in_range(taps[-1], as_expr(found.kernel))
        inside += in_range(at[-1], size)
    value = products.at([image, linearize((out_channel, *taps), strides), *at])
    body = masked(all_of(inside), value, 0)
    summed_sizes = [as_expr(found.taps) for found in phases]
    return converted(builder, builder.reduce("sum", body, sizes, summed_sizes, name=name), dtype)


def _in_phases(
    builder: Builder,
    input: Value,
    weight: Value,
    geometry: Geometry,
    phases: Sequence[_Phases],
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str,
) -> Value:
    """A transposed convolution with strides, without the products of taps that read nothing.

    Those are three of four with a stride of two in both dimensions of an image. The results of each
    group of `_Phases` lie side by side, as channels of their own, and are put in order by what
    reads them.
    """
    images, all_channels = sizes[:2]
    in_channels = input.sizes[1] // geometry.groups
    out_channels = all_channels // geometry.groups
    counts = [as_expr(found.count) for found in phases]
    axes = _axes(images, geometry.groups, [found.size for found in phases], counts)
    inner = (in_channels, *(as_expr(found.taps) for found in phases))
    (row,) = positions((out_channels,), "m")
    channel, *numbers = positions(inner, "k")
    in_channel = axes.group * in_channels + channel
    taps, at = [], []
    exist: list[Scalar] = []
    inside: list[Scalar] = []
    for k, found in enumerate(phases):
        taps.append(found.tap(axes.phases[k], numbers[k]))
        at.append(found.read(axes.phases[k], axes.space[k], numbers[k]))
        exist += in_range(taps[k], as_expr(found.kernel))
        inside += in_range(at[k], input.sizes[2 + k])
    inside += exist
    lhs = masked(all_of(exist), weight.at([in_channel, row, *taps]), 0)
    rhs = masked(all_of(inside), input.at([axes.image, in_channel, *at]), 0)
    strides = contiguous_strides((*counts, all_channels))
    group = linearize((*axes.phases, axes.group * out_channels + row), strides)
    node = _contraction(axes, out_channels, inner, lhs, rhs, dtype, group)
    grouped = (images, product((*counts, all_channels)), *(found.size for found in phases))
    together = builder.contract(dtype, grouped, node, name=f"{name}_phases" if name else "phases")
    image, out_channel, *results = positions(sizes)
    numbers, at, exist = [], [], []
    for found, result in zip(phases, results, strict=True):
        number, position = found.place(result)
        numbers.append(number)
        at.append(position)
        exist += in_range(number, as_expr(found.count))
    value = together.at([image, linearize((*numbers, out_channel), strides), *at])
    return builder.pointwise(masked(all_of(exist), value, 0), sizes, name=name)


def _is_depthwise(groups: int, read: Expr, made: Expr, dtype: DType) -> bool:
    """Whether the channels of a group that are read, or those that are made of them, are one.

    And few of those are read, each by itself.
    """
    f32 = dtype.is_float and compute_dtype(dtype) is dtypes.float32
    few = read.is_constant and int(read) <= _MOST_DEPTH
    return groups > 1 and f32 and few and ONE in (read, made)


def _depthwise(
    builder: Builder,
    input: Value,
    weight: Value,
    geometry: Geometry,
    windows: Windows,
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str,
) -> Value:
    """A convolution of few input channels per group: a contraction's tiles would be nearly empty.

    Neighbouring results read mostly the same elements, which a tile keeps.
    """
    depth = int(input.sizes[1] // geometry.groups)
    multiplier = sizes[1] // geometry.groups
    image, channel = iteration_symbols("b", sizes[:2])
    (within,) = iteration_symbols("d", (depth,))
    at = iteration_symbols("n", input.sizes[2:])
    taps = iteration_symbols("k", windows.kernel)
    in_channel = channel // multiplier * depth + within
    pair = [in_channel, channel % multiplier] if geometry.transposed else [channel, within]
    wide = compute_dtype(dtype)
    node = DepthwiseConvolution(
        output="",
        batch=(sizes[0], sizes[1]),
        positions=tuple(sizes[2:]),
        image_sizes=tuple(input.sizes[2:]),
        depth=depth,
        windows=windows,
        image=cast(input.at([image, in_channel, *at]), wide),
        weight=cast(weight.at([*pair, *taps]), wide),
    )
    return builder.depthwise(dtype, sizes, node, name=name)


def _reduced(
    builder: Builder,
    input: Value,
    weight: Value,
    geometry: Geometry,
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str,
) -> Value:
    """A sum over the input channels of a group and the taps, for each element by itself.

    For one input channel per group: a contraction would have one row, or few, and tiles would be
    empty but for those. For integers too, which a contraction cannot accumulate.
    """
    image, channel, *space = positions(sizes)
    in_channels = input.sizes[1] // geometry.groups
    inner = (in_channels, *weight.sizes[2:])
    if in_channels is ONE:
        inner = inner[1:]
    symbols = positions(inner, "r")
    within, taps = (ZERO, symbols) if in_channels is ONE else (symbols[0], symbols[1:])
    multiplier = sizes[1] // geometry.groups
    in_channel = channel // multiplier * in_channels + within
    pair = [in_channel, channel % multiplier] if geometry.transposed else [channel, within]
    window = geometry.window(input, [image, in_channel], space, taps)
    wide = compute_dtype(dtype)
    body = cast(window, wide) * cast(weight.at([*pair, *taps]), wide)
    return converted(builder, builder.reduce("sum", body, sizes, inner, name=name), dtype)


@lowers(aten.convolution.default)
def lower_convolution(
    builder: Builder,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
    transposed: bool,
    output_padding: Sequence[IntLike],
    groups: int,
) -> Value:
    """The convolution of [N, C, *space] (or its transpose) with a weight, plus a bias per channel.

    The weight is [C_out, C / groups, *kernel], transposed [C, C_out / groups, *kernel]. A
    `Contraction`; for one input channel per group a `DepthwiseConvolution`, or a `Reduction` where
    windows do not fit its tiles; a `Reduction` for integers. 16-bit floats are rounded once, after
    the bias. Raises NotLowered: for bool.
    """
    lists = stride, padding, dilation
    geometry = Geometry.of(input.rank - 2, *lists, groups=groups, transposed=transposed)
    out = builder.out
    dtype = out.dtype if bias is None else compute_dtype(out.dtype)
    result = convolve(builder, input, weight, geometry, out.sizes, dtype)
    if bias is None:
        return result
    return add_scaled(builder, channelwise(bias, input), result)


@lowers(aten.convolution_backward.default)
def lower_convolution_backward(
    builder: Builder,
    grad_output: Value,
    input: Value,
    weight: Value,
    bias_sizes: Sequence[IntLike] | None,
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
    transposed: bool,
    output_padding: Sequence[IntLike],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    """(gradient of the input, of the weight, of the bias), each where ``output_mask`` asks.

    Raises NotLowered: for bool, and for the weight's gradient of any integers.
    """
    lists = stride, padding, dilation
    geometry = Geometry.of(input.rank - 2, *lists, groups=groups, transposed=transposed)
    dtype = input.dtype
    grad_input = grad_weight = grad_bias = None
    if output_mask[0] and builder.is_used(0):
        turned = replace(geometry, transposed=not transposed)
        grad_input = convolve(builder, grad_output, weight, turned, input.sizes, dtype, "input")
    if output_mask[1] and builder.is_used(1):
        grad_weight = _weight_gradient(builder, grad_output, input, weight, geometry)
    if output_mask[2] and builder.is_used(2) and has_no_elements(grad_output.sizes):
        # A result without elements may have no channels where the bias has some, as PyTorch's has
        # for an input without channels.
        sizes = bias_sizes or grad_output.sizes[1:2]
        grad_bias = zeros([as_expr(size) for size in sizes], grad_output.dtype)
    elif output_mask[2] and builder.is_used(2):
        dims = [k for k in range(grad_output.rank) if k != 1]
        grad_bias = summed(builder, grad_output, dims, grad_output.dtype)
    return grad_input, grad_weight, grad_bias


def _weight_gradient(
    builder: Builder, grad: Value, input: Value, weight: Value, geometry: Geometry
) -> Value:
    """Σ over images and positions of the strided side's gradient and the other side's window.

    Rows are the channels that index the weight first, columns its other dimensions.
    """
    slow, fast = (input, grad) if geometry.transposed else (grad, input)
    groups = geometry.groups
    rows, channels = weight.sizes[0] // groups, weight.sizes[1]
    kernel = weight.sizes[2:]
    inner = (slow.sizes[0], *slow.sizes[2:])
    if has_no_elements((*weight.sizes, *inner)):
        return zeros(weight.sizes, weight.dtype)
    if not weight.dtype.is_float:
        raise NotLowered(f"the gradient of a convolution of {weight.dtype.name}")
    wide = compute_dtype(weight.dtype)
    windows = replace(geometry, transposed=False).tiled(kernel)
    if groups > 1 and channels is ONE and wide is dtypes.float32 and windows is not None:
        return _depthwise_weight_gradient(builder, slow, fast, weight, windows, rows)
    if groups > 1 and channels is ONE:
        channel, _, *taps = positions(weight.sizes)
        image, *at = positions(inner, "r")
        window = geometry.read(fast, [image, channel // rows], at, taps)
        body = cast(slow.at([image, channel, *at]), wide) * cast(window, wide)
        total = builder.reduce("sum", body, weight.sizes, inner, name="weight")
        return converted(builder, total, weight.dtype)
    batch = (as_expr(groups),) if groups > 1 else ()
    group = positions(batch, "b")[0] if batch else ZERO
    (row,) = positions((rows,), "m")
    channel, *taps = positions((channels, *kernel), "n")
    image, *at = positions(inner, "k")
    lhs = slow.at([image, group * rows + row, *at])
    rhs = geometry.read(fast, [image, group * channels + channel], at, taps)
    node = Contraction(
        output="",
        batch=batch,
        rows=(rows,),
        columns=(channels, *kernel),
        inner=inner,
        lhs=cast(lhs, wide),
        rhs=cast(rhs, wide),
        index=(group * rows + row, channel, *taps),
    )
    return builder.contract(weight.dtype, weight.sizes, node, name="weight")


def _depthwise_weight_gradient(
    builder: Builder, slow: Value, fast: Value, weight: Value, windows: Windows, rows: Expr
) -> Value:
    """`_weight_gradient` of one channel per group on each side of it, or several that are rows."""
    (channel,) = iteration_symbols("c", weight.sizes[:1])
    (image,) = iteration_symbols("r", slow.sizes[:1])
    taps = iteration_symbols("k", windows.kernel)
    at, read = iteration_symbols("m", slow.sizes[2:]), iteration_symbols("n", fast.sizes[2:])
    wide = compute_dtype(weight.dtype)
    node = DepthwiseWeightGradient(
        output="",
        channels=weight.sizes[0],
        images=slow.sizes[0],
        positions=tuple(slow.sizes[2:]),
        image_sizes=tuple(fast.sizes[2:]),
        windows=windows,
        index=(channel, ZERO, *taps),
        moved=cast(slow.at([image, channel, *at]), wide),
        image=cast(fast.at([image, channel // rows, *read]), wide),
    )
    return builder.depthwise(weight.dtype, weight.sizes, node, name="weight")
