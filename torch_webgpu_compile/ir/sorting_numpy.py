"""The nodes of `sorting_nodes` on NumPy, for `interpret`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def order(words: Sequence[Array]) -> Array:
    """Positions along the last dimension in the order of keys, the least significant word first."""
    return np.asarray(np.lexsort(tuple(words), axis=-1))


def digit_counts(digit: Array, part: int, bins: int) -> Array:
    """How many of each digit there are in each part of a row."""
    *rows, length = digit.shape
    parts = -(-length // part)
    found = np.zeros((*rows, parts, bins), np.int32)
    *at, place = np.nonzero(digit < bins)
    index = (*at, place // part, digit[digit < bins].astype(np.int64))
    np.add.at(found, index, 1)
    return found


def part_sums(counts: Array) -> tuple[Array, Array]:
    """(of each part, the sums of the parts before it; the sums of all)"""
    sums = np.cumsum(counts, -2, dtype=np.int32)
    return sums - counts, sums[..., -1, :]


def digit_places(digit: Array, tile: int, before: Array, totals: Array) -> Array:
    """Positions of elements in the order of a digit."""
    *rows, length = digit.shape
    starts = np.cumsum(totals, -1) - totals
    places = np.zeros(digit.shape, np.int64)
    for row in np.ndindex(*rows):
        for first in range(0, length, tile):
            digits = digit[row][first : first + tile].astype(np.int64)
            by_digit = np.argsort(digits, kind="stable")
            rank = np.empty_like(by_digit)
            rank[by_digit] = np.arange(len(digits))
            rank -= np.searchsorted(digits[by_digit], digits)
            start = starts[row][digits] + before[row][first // tile][digits]
            places[row][first : first + tile] = start + rank
    return places


def pick_digit(counts: Array, wanted: Array, above: Array, shift: Array) -> tuple[Array, Array]:
    """(the prefix with the next digit, the number among elements with that prefix)"""
    totals = counts.sum(-2)
    ends = np.cumsum(totals, -1)
    digit = (ends < wanted[..., None]).sum(-1)
    last = np.minimum(digit, counts.shape[-1] - 1)[..., None]
    start = np.take_along_axis(ends - totals, last, -1)[..., 0]
    return above | digit.astype(np.uint32) << shift, wanted - start


def compact(kind: Array, count: int) -> Array:
    """Positions of elements of kind 0, and of the first ones of kind 1 up to ``count`` in all."""
    return np.sort(np.argsort(kind, -1, kind="stable")[..., :count], -1)
