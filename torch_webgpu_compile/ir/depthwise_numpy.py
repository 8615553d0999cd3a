"""Convolutions whose channels do not mix, and their weights' gradients, on NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .depthwise_nodes import ConvolutionWindows

Array = npt.NDArray[Any]


def _taps(
    windows: ConvolutionWindows, image: Array, positions: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[Array, ...], Array]]:
    """(tap, the results that it has, by dimension, what they read), of every tap.

    ``image``: [..., *space]. What is read is [..., *(results by dimension)], 0 outside.
    """
    rank = len(positions)
    for tap in np.ndindex(*windows.kernel):
        where: list[Array] = []
        read = image
        for dim, (count, size) in enumerate(zip(positions, image.shape[-rank:], strict=True)):
            every = [windows.read_at(dim, m, tap[dim]) for m in range(count)]
            whole = np.array([m for m, at in enumerate(every) if at is not None], int)
            at = np.array([at for at in every if at is not None], int)
            inside = (at >= 0) & (at < size)
            axis = read.ndim - rank + dim
            found = np.take(read, np.where(inside, at, 0), axis) if size else None
            shape = [1] * read.ndim
            shape[axis] = len(at)
            if found is None:
                found = np.zeros((*read.shape[:axis], len(at), *read.shape[axis + 1 :]), read.dtype)
            read = np.where(inside.reshape(shape), found, 0)
            where.append(whole)
        yield tap, tuple(where), read


def convolution(
    windows: ConvolutionWindows, image: Array, weight: Array, positions: tuple[int, ...]
) -> Array:
    """The output of a `DepthwiseConvolution`: [images, channels, *positions].

    ``image``: [images, channels, depth, *space]; ``weight``: [images, channels, depth, *kernel].
    """
    out = np.zeros((*image.shape[:2], *positions), np.float32)
    for tap, where, read in _taps(windows, image, positions):
        each = weight.reshape(*weight.shape[:3], -1)[..., np.ravel_multi_index(tap, windows.kernel)]
        found = (read * each.reshape(*each.shape, *(1 for _ in positions))).sum(2)
        out[np.ix_(*map(range, out.shape[:2]), *where)] += found
    return out


def weight_gradient(windows: ConvolutionWindows, moved: Array, image: Array) -> Array:
    """The sums of a `DepthwiseWeightGradient`: [channels, *kernel].

    ``moved``: [channels, images, *positions]; ``image``: [channels, images, *space].
    """
    rank = len(windows.kernel)
    axes = tuple(range(1, moved.ndim))
    found = [(moved * read).sum(axes) for _, _, read in _taps(windows, image, moved.shape[-rank:])]
    return np.stack(found, -1).reshape(-1, *windows.kernel).astype(np.float32)
