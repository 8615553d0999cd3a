"""How long dispatches may take, so that no submission keeps a GPU busy for too long.

Some systems reset a GPU whose work takes longer than two seconds (Windows' TDR, and browsers), and
a display that it also draws stands still meanwhile. The prediction is a rate by the kind of
adapter, well below what such adapters reach: what it costs is a submit now and then.

A dispatch that is predicted to take longer than a submission may is divided into slices of its
grid. WebGPU always starts at workgroup 0, so a kernel has to be told where its slice starts. Only
the kernels of dispatches that are divided are: `sliced_kernel` makes a variant of their text. It
takes the first workgroup and the whole grid from the end of its parameters, so that one pipeline
runs all slices, and computes just what the whole dispatch does.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

from ..plan.model import Kernel

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

_SLICE_ROWS = 2  # vec4s behind the parameters: the first workgroup, the whole grid
# At the start of a line, as comments quote what users wrote.
_UNIFORM = re.compile(
    r"(?m)^(@group\(0\) @binding\(\d+\) var<uniform> )(\w+)(: array<vec4<i32>, )\d+>;"
)
_ENTRY = re.compile(r"(?m)^([^/\n]*\b)fn main\(([^{]*)\)\s*\{\n?")
_ARGUMENT = re.compile(r"@builtin\((\w+)\)\s*(\w+)\s*:\s*([\w<>]+)")
_UNAWARE = {"local_invocation_id", "local_invocation_index"}  # the same in any slice


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


def sliced_kernel(kernel: Kernel) -> Kernel | None:
    """The kernel for slices of its grid: `Slice.words` follow the parameters, padded to vec4s.

    None for an entry point that is not written as the templates write theirs: with builtins as
    separate arguments, among them of the grid only ``workgroup_id`` and ``num_workgroups``.
    """
    entries = list(_ENTRY.finditer(kernel.wgsl))
    if len(entries) != 1:
        return None
    (entry,) = entries
    arguments = _ARGUMENT.findall(entry[2])
    if _ARGUMENT.sub("", entry[2]).strip(", \n\t"):
        return None
    rows = -(-kernel.parameter_count // 4)
    declared = _UNIFORM.search(kernel.wgsl)
    if (declared is None) != (rows == 0):
        return None
    name = "tw_slice" if declared is None else declared[2]
    kept, lines = [], []
    for builtin, argument, kind in arguments:
        if builtin == "workgroup_id":
            kept.append("@builtin(workgroup_id) tw_group: vec3<u32>")
            lines.append(f"  let {argument} = tw_group + bitcast<vec4<u32>>({name}[{rows}]).xyz;\n")
        elif builtin == "num_workgroups":
            lines.append(f"  let {argument} = bitcast<vec4<u32>>({name}[{rows + 1}]).xyz;\n")
        elif builtin in _UNAWARE:
            kept.append(f"@builtin({builtin}) {argument}: {kind}")
        else:
            return None
    head = f"{entry[1]}fn main({', '.join(kept)}) {{\n{''.join(lines)}"
    wgsl = kernel.wgsl[: entry.start()] + head + kernel.wgsl[entry.end() :]
    size = rows + _SLICE_ROWS
    if declared is not None:
        wgsl = _UNIFORM.sub(rf"\g<1>\g<2>\g<3>{size}>;", wgsl, count=1)
    else:
        binding = len(kernel.bindings)
        declaration = (
            f"@group(0) @binding({binding}) var<uniform> tw_slice: array<vec4<i32>, {size}>;\n"
        )
        wgsl = _behind_enables(wgsl, declaration)
    return replace(kernel, wgsl=wgsl, parameter_count=4 * size)


def _behind_enables(wgsl: str, declaration: str) -> str:
    """WGSL wants its ``enable`` and ``requires`` directives before all declarations."""
    directives = re.match(r"(?:\s*(?:(?:enable|requires|diagnostic)\b[^;]*;|//[^\n]*\n))*\s*", wgsl)
    end = directives.end() if directives else 0
    return wgsl[:end] + declaration + wgsl[end:]
