"""Reads of images by convolutions, and convolutions as contractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import DType
from ..ir.depthwise_nodes import ConvolutionWindows, tiled_windows
from ..ir.nodes import Contraction
from ..ir.scalar import Index, Scalar, apply, cast
from ..symbolic.sizes import ONE, ZERO, Expr, IntLike, as_expr, magnitude, product
from .builder import masked
from .promotion import compute_dtype
from .value import Value, all_of, in_range, positions

# From this many output positions per image on, an image is a batch of the contraction: its columns
# are then contiguous in memory. Below it, images share the columns so that tiles are full.
_BATCHED_POSITIONS = 256


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

    def tiled(self, kernel: Sequence[Expr]) -> ConvolutionWindows | None:
        """Its windows, if a kernel that keeps tiles of images can go through them."""
        return tiled_windows(kernel, self.stride, self.padding, self.dilation, self.transposed)

    def window(
        self, value: Value, lead: Sequence[Expr], at: Sequence[Expr], kernel: Sequence[Expr]
    ) -> Scalar:
        """The element that tap ``kernel`` of the result at ``at`` reads, 0 outside of the value."""
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


def _is_batched(positions_per_image: Expr) -> bool:
    count = magnitude(positions_per_image)
    return count is None or count >= _BATCHED_POSITIONS


@dataclass(frozen=True)
class Axes:
    """How (image, phases, group, column space) map to a contraction's symbols."""

    batch: tuple[Expr, ...]
    columns: tuple[Expr, ...]
    image: Expr
    phases: tuple[Expr, ...]
    group: Expr
    space: tuple[Expr, ...]


def axes_of(images: Expr, groups: int, space: Sequence[Expr], phases: Sequence[Expr] = ()) -> Axes:
    """The axes of a convolution whose results have this space, in ``phases`` if there are some."""
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
    return Axes(batch, columns, image, tuple(symbols), group, tuple(column_symbols))


def contraction_of(
    axes: Axes,
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
