"""Transposed convolutions, and gradients of inputs: without the taps that read nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import DType
from ..ir.scalar import Scalar
from ..symbolic.sizes import (
    Expr,
    as_expr,
    ceildiv,
    contiguous_strides,
    delinearize,
    linearize,
    magnitude,
    product,
)
from .builder import Builder, masked
from .convolution_geometry import Geometry, axes_of, contraction_of
from .promotion import compute_dtype
from .reductions import converted
from .value import Value, all_of, in_range, positions

# Channels of a result of which a tile of a contraction is mostly empty; how many times as many each
# is made of, at least, where what taps add to it is stored, and how many times as much as what is
# read that may be. On an H200 the gradient of 16 × 3 × 224² images by 64 filters of 7 × 7, with
# strides of 2, takes 7.2 ms with a row for each channel, 0.25 with a row for each tap of one.
_FEW_CHANNELS, _LEAST_OF_CHANNELS, _MOST_STORED = 8, 4, 8


@dataclass(frozen=True)
class Phases:
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
    def of(geometry: Geometry, k: int, kernel: Expr, size: Expr) -> Phases | None:
        """The phases of dimension ``k``; None if they are unknown, or taps are in several groups.

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
        return Phases(stride, padding, dilation, taps, count, most, ceildiv(size, stride))

    def tap(self, group: Expr, number: Expr) -> Expr:
        """The number of a group's tap among all; those from ``kernel`` on do not exist."""
        return group + number * self.stride

    def read(self, group: Expr, position: Expr, number: Expr) -> Expr:
        """The position that a group's result reads for one of its taps, perhaps outside."""
        skipped = (group * self.dilation - self.padding) // self.stride
        return position - skipped - number * self.dilation

    def place(self, result: Expr) -> tuple[Expr, Expr]:
        """The group of a result, and the position there; groups from ``count`` on do not exist."""
        inverse = pow(self.dilation, -1, self.stride)
        group = (result + self.padding) % self.stride * inverse % self.stride
        return group, result // self.stride


def phases_of(
    geometry: Geometry, kernel: Sequence[Expr], space: Sequence[Expr]
) -> Sequence[Phases]:
    """The phases of each dimension of a transposed convolution; none where one has none."""
    dims = enumerate(zip(kernel, space, strict=True))
    found = [Phases.of(geometry, k, taps, size) for k, (taps, size) in dims]
    known = [phases for phases in found if phases is not None]
    return known if len(known) == len(found) else ()


def makes_few_channels(input: Value, channels: Expr, kernel: Sequence[Expr]) -> bool:
    """Whether a convolution's result has few channels, each made of many, for windows that fit.

    ``kernel``: its taps, whose products with all of a channel's weights are to be stored.
    """
    made, read = magnitude(channels), magnitude(input.sizes[1])
    taps = product(kernel)
    if made is None or read is None or not taps.is_constant:
        return False
    is_worth = int(taps) > 1 and _LEAST_OF_CHANNELS * made <= read
    return made <= _FEW_CHANNELS and is_worth and made * int(taps) <= _MOST_STORED * read


def by_taps(
    builder: Builder,
    input: Value,
    weight: Value,
    phases: Sequence[Phases],
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
    axes = axes_of(images, 1, read_space)
    (channel,) = positions((input.sizes[1],), "k")
    (row,) = positions((product(rows),), "m")
    strides = contiguous_strides(rows)
    lhs = weight.at([channel, *delinearize(row, rows)])
    rhs = input.at([axes.image, channel, *axes.space])
    node = contraction_of(axes, product(rows), (input.sizes[1],), lhs, rhs, dtype, row)
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


def in_phases(
    builder: Builder,
    input: Value,
    weight: Value,
    geometry: Geometry,
    phases: Sequence[Phases],
    sizes: tuple[Expr, ...],
    dtype: DType,
    name: str,
) -> Value:
    """A transposed convolution with strides, without the products of taps that read nothing.

    Those are three of four with a stride of two in both dimensions of an image. The results of each
    group of `Phases` lie side by side, as channels of their own, and are put in order by what
    reads them.
    """
    images, all_channels = sizes[:2]
    in_channels = input.sizes[1] // geometry.groups
    out_channels = all_channels // geometry.groups
    counts = [as_expr(found.count) for found in phases]
    axes = axes_of(images, geometry.groups, [found.size for found in phases], counts)
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
    node = contraction_of(axes, out_channels, inner, lhs, rhs, dtype, group)
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
