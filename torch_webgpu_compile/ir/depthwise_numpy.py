"""Convolutions whose channels do not mix, and their weights' gradients, on NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .depthwise_nodes import ConvolutionWindows

Array = npt.NDArray[Any]


def _reads(windows: ConvolutionWindows, image: Array, positions: Sequence[int]) -> Array:
    """What each tap reads for each result: [..., *(results, taps by dimension)], 0 outside.

    ``image``: [..., *space].
    """
    first = image.ndim - len(positions)
    for dim in reversed(range(len(positions))):
        axis, size = first + dim, image.shape[first + dim]
        at = np.zeros((positions[dim], windows.kernel[dim]), int)  # a 0 before the first element
        for place in np.ndindex(*at.shape):
            read = windows.read_at(dim, *place)
            at[place] = read + 1 if read is not None and 0 <= read < size else 0
        before = [(0, 0)] * image.ndim
        before[axis] = (1, 0)
        image = np.take(np.pad(image, before), at, axis)
    return image


def _labels(windows: ConvolutionWindows) -> tuple[list[int], list[int], list[int]]:
    """`numpy.einsum`'s labels of results, of taps, and of both by dimension."""
    both = list(range(3, 3 + 2 * len(windows.kernel)))
    return both[::2], both[1::2], both


def convolution(
    windows: ConvolutionWindows, image: Array, weight: Array, positions: Sequence[int]
) -> Array:
    """The output of a `DepthwiseConvolution`: [images, channels, *positions].

    ``image``: [images, channels, depth, *space]; ``weight``: [images, channels, depth, *kernel].
    """
    read, (results, taps, both) = _reads(windows, image, positions), _labels(windows)
    return np.asarray(np.einsum(read, [0, 1, 2, *both], weight, [0, 1, 2, *taps], [0, 1, *results]))


def weight_gradient(windows: ConvolutionWindows, moved: Array, image: Array) -> Array:
    """The sums of a `DepthwiseWeightGradient`: [channels, *kernel].

    ``moved``: [channels, images, *positions]; ``image``: [channels, images, *space].
    """
    read, (results, taps, both) = _reads(windows, image, moved.shape[2:]), _labels(windows)
    return np.asarray(np.einsum(moved, [0, 1, *results], read, [0, 1, *both], [0, *taps]))
