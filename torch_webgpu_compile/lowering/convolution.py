"""Convolutions and their gradients as contractions. Source: ATen ``convolution(_backward)``.

Shapes: input [N, C, *space], weight [O, C/groups, *kernel]; of a transposed convolution the weight
is [C, O/groups, *kernel].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.depthwise_nodes import ConvolutionWindows, DepthwiseConvolution, DepthwiseWeightGradient
from ..ir.nodes import Contraction
from ..ir.scalar import cast
from ..ir.spaces import iteration_symbols
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, as_expr
from .builder import Builder
from .convolution_geometry import Geometry, axes_of, contraction_of
from .matmul import add_scaled
from .promotion import compute_dtype
from .reductions import Reducing, converted
from .registry import NotLowered, lowers
from .transposed_convolution import by_taps, in_phases, makes_few_channels, phases_of
from .value import Value, channelwise, has_no_elements, positions, zeros

aten = torch.ops.aten

# Input channels of a group that a depthwise convolution's kernel goes through one by one.
_MOST_DEPTH = 8


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
    phases = phases_of(geometry, kernel, space) if geometry.transposed else ()
    if phases and geometry.groups == 1 and makes_few_channels(input, sizes[1], kernel):
        return by_taps(builder, input, weight, phases, sizes, dtype, name)
    if phases and any(step is not ONE for step in geometry.stride):
        return in_phases(builder, input, weight, geometry, phases, sizes, dtype, name)
    axes = axes_of(images, geometry.groups, space)
    (row,) = positions((out_channels,), "m")
    channel, *taps = positions(inner, "k")
    in_channel = axes.group * in_channels + channel
    out_channel = axes.group * out_channels + row
    channels = [in_channel, row] if geometry.transposed else [out_channel, channel]
    lhs = weight.at([*channels, *taps])
    rhs = geometry.window(input, [axes.image, in_channel], axes.space, taps)
    node = contraction_of(axes, out_channels, inner, lhs, rhs, dtype, out_channel)
    return builder.contract(dtype, sizes, node, name=name)


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
    windows: ConvolutionWindows,
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
    return builder.contract(dtype, sizes, node, name=name)


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
        split = Reducing(grad_output, dims)
        body = cast(split.body(), compute_dtype(grad_output.dtype))
        total = split.reduce(builder, "sum", body, keepdim=False, name="sum")
        grad_bias = converted(builder, total, grad_output.dtype)
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
    builder: Builder,
    slow: Value,
    fast: Value,
    weight: Value,
    windows: ConvolutionWindows,
    rows: Expr,
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
    return builder.contract(weight.dtype, weight.sizes, node, name="weight")
