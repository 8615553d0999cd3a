"""How long dispatches may take, so that no submission keeps a GPU busy for too long.

Some systems reset a GPU whose work takes longer than two seconds (Windows' TDR, and browsers), and
a display that it also draws stands still meanwhile. The prediction is a rate by the kind of
adapter, well below what such adapters reach: what it costs is a submit now and then.

A dispatch that is predicted to take longer than a submission may is divided into slices of its
grid. WebGPU always starts at workgroup 0, so a kernel has to be told where its slice starts. Only
the kernels of dispatches that are divided are: `plan.entry_point.sliced_kernel` makes a variant. It
takes the first workgroup and the whole grid from the end of its parameters, so that one pipeline
runs all slices, and computes just what the whole dispatch does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

MAX_SECONDS = 0.5
"""Predicted work after which a submission ends: it holds at most twice that. No dispatch takes
longer either, unless a single one of its workgroups does."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The least rates of kernels: bytes read and written, and operations, per second."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, nbytes: int, flops: int) -> float:
        """The predicted seconds of a dispatch."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


_PACES = {
    "discrete": Pace(100e9, 1e12),
    "integrated": Pace(10e9, 100e9),
    "cpu": Pace(1e9, 5e9),
}


def pace_of(adapter_type: str) -> Pace:
    """The pace of a kind of adapter (`AdapterInfo.type`); that of an integrated one if unknown."""
    return _PACES.get(adapter_type, _PACES["integrated"])


Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Slice:
    """The workgroups of a grid from ``first`` on, ``grid`` of them per dimension."""

    first: Grid
    grid: Grid

    def words(self, whole: Grid) -> bytes:
        """The words behind a sliced kernel's parameters, for this slice of a whole grid."""
        return struct.pack("<8i", *self.first, 0, *whole, 0)

    def share(self, whole: Grid) -> float:
        """The part of a whole grid's workgroups that it has."""
        return self.workgroups / (whole[0] * whole[1] * whole[2])

    @property
    def workgroups(self) -> int:
        """How many it has."""
        return self.grid[0] * self.grid[1] * self.grid[2]


def slices_of(grid: Grid, most: int) -> list[Slice]:
    """Disjoint slices that cover a grid, in its order: x is the fastest dimension.

    Args:
        grid: workgroups per dimension, none 0.
        most: the workgroups of a slice, at least 1.
    """
    x, y, _ = grid
    steps = (min(x, most), max(1, most // x), max(1, most // (x * y)))
    bounds = [list(_bounds(extent, step)) for extent, step in zip(grid, steps, strict=True)]
    return [
        Slice((x0, y0, z0), (x1 - x0, y1 - y0, z1 - z0))
        for (z0, z1), (y0, y1), (x0, x1) in product(*(pairwise(b) for b in reversed(bounds)))
    ]


def _bounds(extent: int, most: int) -> Iterator[int]:
    """Starts of parts of about equal length, none longer than ``most``; and the end."""
    count = -(-extent // most)
    return (k * extent // count for k in range(count + 1))
