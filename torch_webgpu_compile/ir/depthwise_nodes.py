"""The nodes of convolutions whose channels do not mix, and of their weights' gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from .. import dtypes
from ..symbolic.sizes import Expr, as_expr
from .buffers import Buffer
from .scalar import Scalar
from .spaces import Anchor, Rule, Space, index_rules, shape_rule

# Kernels keep a sum or a weight for each tap in registers, and have code for each.
_MOST_TAPS = 64
# Elements that a window may reach over, so that a tile and what surrounds it are in workgroup
# memory: along each dimension, and together.
_WIDEST, _LARGEST = 128, 512
# Positions per position of the other side: invocations have code for as many results.
_LARGEST_STRIDE = 4


@dataclass(frozen=True, slots=True)
class ConvolutionWindows:
    """The geometry of a convolution's windows, one entry per space dimension.

    For the result at m, the tap k reads position m·stride − padding + k·dilation, or, of a
    transposed convolution, (m + padding − k·dilation) / stride where that is whole.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False

    @property
    def taps(self) -> int:
        """Elements of a window."""
        return prod(self.kernel)

    def fits_tiles(self) -> bool:
        """Whether the kernels of this module's nodes can go through such windows.

        They have one or two space dimensions, few taps, and do not reach far.
        """
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return (
            len(self.kernel) in (1, 2)
            and self.taps <= _MOST_TAPS
            and max(spans) <= _WIDEST
            and prod(spans) <= _LARGEST
            and max(self.stride) <= _LARGEST_STRIDE
            and all(abs(padding) <= _WIDEST for padding in self.padding)
        )

    def read_at(self, dim: int, position: int, tap: int) -> int | None:
        """The position that a tap reads along a dimension, from where a run of results starts.

        ``position`` counts results from the start of the run, which is a multiple of the stride of
        a transposed convolution; other runs of it read as much further as they start further,
        divided by the stride. None where nothing is read.
        """
        padding, step = self.padding[dim], tap * self.dilation[dim]
        if not self.transposed:
            return position * self.stride[dim] - padding + step
        shifted = position + padding - step
        return None if shifted % self.stride[dim] else shifted // self.stride[dim]


def tiled_windows(
    kernel: Sequence[Expr],
    stride: Sequence[Expr],
    padding: Sequence[Expr],
    dilation: Sequence[Expr],
    transposed: bool,
) -> ConvolutionWindows | None:
    """The windows of a convolution that fit tiles; None of any other."""
    lists = (kernel, stride, padding, dilation)
    if not all(entry.is_constant for entries in lists for entry in entries):
        return None
    sizes, steps, before, apart = (tuple(map(int, entries)) for entries in lists)
    windows = ConvolutionWindows(sizes, steps, before, apart, transposed)
    return windows if windows.fits_tiles() else None


@dataclass(frozen=True, slots=True)
class DepthwiseConvolution(Anchor):
    """output[b0, b1, m…] = Σ over d, k… of image(b0, b1, d, read) · weight(b0, b1, d, k…).

    ``batch`` is (images, result channels), ``depth`` the channels d that each result channel reads,
    ``positions`` the space of results and ``image_sizes`` that of the image. What ``windows`` read
    outside of the image is 0. ``image`` is a scalar over (b…, d0, n…), ``weight`` one over
    (b…, d0, k…), both float32.
    """

    TILED: ClassVar[bool] = True

    batch: tuple[Expr, Expr]
    positions: tuple[Expr, ...]
    image_sizes: tuple[Expr, ...]
    depth: int
    windows: ConvolutionWindows
    image: Scalar
    weight: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        outer, depth = ("b", self.batch), ("d", (as_expr(self.depth),))
        taps = tuple(map(as_expr, self.windows.kernel))
        return {
            "image": (outer, depth, ("n", self.image_sizes)),
            "weight": (outer, depth, ("k", taps)),
        }

    @property
    def extents(self) -> tuple[Expr, ...]:
        taps = as_expr(self.depth * self.windows.taps)
        return (*self.batch, *self.positions, taps)

    @property
    def points(self) -> Space:
        return ("b", self.batch), ("m", self.positions)

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        yield shape_rule(buffers[self.output], (*self.batch, *self.positions))
        both = self.image.dtype is dtypes.float32 and self.weight.dtype is dtypes.float32
        yield both, "a float32 image and weight"
        rank = len(self.windows.kernel)
        yield len(self.positions) == len(self.image_sizes) == rank, "sizes of its windows' rank"
        yield self.windows.fits_tiles(), "windows that fit tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthwiseWeightGradient(Anchor):
    """Σ over p of output[index(p, c, k…)] = Σ over r, m… of moved(c, r, m…) · image(c, r, read).

    ``channels`` c are those of the weight, ``images`` r. Results are in ``parts`` p, whose sum
    alone is defined: which images and positions a part adds up is for the kernel to choose.
    ``positions`` m… are those of ``moved``, which ``windows`` (not transposed) move over the image
    with; what they read outside of the image, of ``image_sizes``, is 0. ``image`` is a scalar over
    (c0, r0, n…), ``moved`` one over (c0, r0, m…), both float32.
    """

    TILED: ClassVar[bool] = True

    channels: Expr
    images: Expr
    positions: tuple[Expr, ...]
    image_sizes: tuple[Expr, ...]
    windows: ConvolutionWindows
    parts: int = 1
    index: tuple[Expr, ...]
    moved: Scalar
    image: Scalar

    @property
    def spaces(self) -> dict[str, Space]:
        outer, images = ("c", (self.channels,)), ("r", (self.images,))
        return {
            "moved": (outer, images, ("m", self.positions)),
            "image": (outer, images, ("n", self.image_sizes)),
            "index": self.points,
        }

    @property
    def extents(self) -> tuple[Expr, ...]:
        return (self.channels, self.images, *self.positions, as_expr(self.windows.taps))

    @property
    def points(self) -> Space:
        taps = tuple(map(as_expr, self.windows.kernel))
        return ("p", (as_expr(self.parts),)), ("c", (self.channels,)), ("k", taps)

    @property
    def result_index(self) -> tuple[Expr, ...]:
        return self.index

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        both = self.moved.dtype is dtypes.float32 and self.image.dtype is dtypes.float32
        yield both, "float32 operands"
        rank = len(self.windows.kernel)
        yield len(self.positions) == len(self.image_sizes) == rank, "sizes of its windows' rank"
        tiled = self.windows.fits_tiles() and not self.windows.transposed
        yield tiled, "windows that fit tiles and are not transposed"
        yield from index_rules(self.index, self.spaces["index"], buffers[self.output])
