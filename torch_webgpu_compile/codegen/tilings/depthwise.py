"""How depthwise convolutions and their weights' gradients are divided among workgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, isqrt

from ...ir.access import VECTOR
from ...ir.anchors import anchor_members
from ...ir.buffers import Buffer
from ...ir.depthwise_access import (
    channels_are_neighbours,
    gradient_has_neighbours,
    stores_neighbours,
)
from ...ir.depthwise_nodes import ConvolutionWindows, DepthwiseConvolution, DepthwiseWeightGradient
from ...ir.graph import AnchorGroup
from ...symbolic.sizes import ONE, Expr, typical
from ...target import Target

_SUBGROUP = 32
_NEIGHBOURS = 8  # channels in a sector of 32 bytes, where those are neighbours
# Multiply-adds of four in the code: drivers compile longer code in more than linear time. LLVM, for
# CPUs, takes a second for 200, and CPUs have few registers to keep what several rows share.
_MOST_STATEMENTS, _MOST_ON_CPUS = 200, 64
# What takes time, in multiply-adds of a multiprocessor. An invocation's: an access of four elements
# of workgroup memory (beside multiply-adds), one of memory, what the latter takes more where
# channels are neighbours, and adding up the sum of each tap at the end. A workgroup's: by itself,
# and while it waits for each four elements that an invocation loads, one after the other. Fitted to
# times of 7x7 windows over 56x56, 28x28 and 14x14 positions on an H100, from which these and 9.5 µs
# are a tenth (root mean square of 125).
_TILE_ACCESS, _ACCESS, _NEIGHBOUR_ACCESS, _ADDING = 16, 10, 50, 20
_WORKGROUP, _WAIT = 10_000, 55_000
_REGISTERS = 64  # of an invocation, besides sums of taps


_SINGLE = ConvolutionWindows((1,), (1,), (0,), (1,))  # across a plane that is one line


@dataclass(frozen=True, slots=True)
class WindowAxis:
    """A dimension of windows."""

    windows: ConvolutionWindows
    dim: int

    @property
    def taps(self) -> int:
        """Elements of a window along it."""
        return self.windows.kernel[self.dim]

    @property
    def phases(self) -> int:
        """The number that an invocation's results are a multiple of, so that all read alike."""
        return self.windows.stride[self.dim] if self.windows.transposed else 1

    def read_at(self, position: int, tap: int) -> int | None:
        """See `ConvolutionWindows.read_at`."""
        return self.windows.read_at(self.dim, position, tap)

    def advance(self, results: int) -> int:
        """How much further the next run of so many results reads."""
        forward = 1 if self.windows.transposed else self.windows.stride[self.dim]
        return results // self.phases if self.phases > 1 else results * forward

    def reach(self, results: int) -> tuple[int, int]:
        """The first and the last position that a run of results reads, from where it starts."""
        return _reach(self, results)


@lru_cache(maxsize=1024)
def _reach(axis: WindowAxis, results: int) -> tuple[int, int]:
    every = [axis.read_at(i, t) for i in range(results) for t in range(axis.taps)]
    found = [at for at in every if at is not None]
    return min(found, default=0), max(found, default=0)


def axes_of(windows: ConvolutionWindows) -> tuple[WindowAxis, WindowAxis]:
    """The axis of lines, and that of elements of a line."""
    if len(windows.kernel) == 1:
        return WindowAxis(_SINGLE, 0), WindowAxis(windows, 0)
    return WindowAxis(windows, 0), WindowAxis(windows, 1)


@dataclass(frozen=True, slots=True)
class DepthwiseTiling:
    """The work of a workgroup.

    Attributes:
        channels, images: planes; only a weight's gradient has several images.
        lines, columns: invocations of each plane.
        rows, vectors: lines of positions of an invocation, and fours of positions along each.
    """

    channels: int
    images: int
    lines: int
    columns: int
    rows: int
    vectors: int

    @property
    def planes(self) -> int:
        """Planes of a workgroup."""
        return self.channels * self.images

    @property
    def workgroup(self) -> int:
        """Invocations."""
        return self.planes * self.lines * self.columns


@dataclass(frozen=True, slots=True)
class ImageTile:
    """The part of each plane of the image in workgroup memory, in fours along a line.

    Attributes:
        first_line, first_quad: where it starts, from where the workgroup starts to read.
        lines, quads: its extent.
        plane: fours from one plane to the next: an odd number, so that invocations side by side
            that are in different planes access different banks.
    """

    first_line: int
    first_quad: int
    lines: int
    quads: int

    @property
    def plane(self) -> int:
        return self.lines * self.quads | 1


def image_tile(tiling: DepthwiseTiling, windows: ConvolutionWindows) -> ImageTile:
    """The image's tile of a workgroup."""
    across, along = axes_of(windows)
    first, last = across.reach(tiling.rows)
    lines = (tiling.lines - 1) * across.advance(tiling.rows) + last - first + 1
    run = VECTOR * tiling.vectors
    start, end = (at // VECTOR for at in along.reach(run))
    quads = (tiling.columns - 1) * along.advance(run) // VECTOR + end - start + 1
    return ImageTile(first, start, lines, quads)


@dataclass(frozen=True, slots=True)
class Problem:
    """A depthwise convolution as its tiling depends on it.

    Attributes:
        images, channels, lines, elements: numbers of results (or, of a weight's gradient, positions
            that are added up), typical ones where a call decides.
        neighbours: whether channels, not positions, are neighbours in the image's memory, or in
            that of the result or the other operand.
        sums: whether it is a weight's gradient, which keeps sums of taps for all of its positions.
        factor: what divides the number of lines, whatever a call decides. A weight's gradient has
            no invocation of which some lines are there and others are not: what it reads for those
            may be infinite, and no factor makes that 0.
        parts: that the sums of a weight's gradient are in, each of other workgroups.
    """

    windows: ConvolutionWindows
    images: int
    channels: int
    lines: int
    elements: int
    neighbours: bool
    sums: bool = False
    factor: int = 1
    parts: int = 1


def plane_sizes(sizes: Sequence[Expr]) -> tuple[Expr, Expr]:
    """Lines, and elements of a line."""
    return (ONE, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def convolution_problem(group: AnchorGroup, buffers: Mapping[str, Buffer]) -> Problem:
    """Of the kernel of a depthwise convolution and its epilogue."""
    node = group.anchor
    assert isinstance(node, DepthwiseConvolution)
    are_neighbours = channels_are_neighbours(node.image, node, buffers) or stores_neighbours(
        anchor_members([group], buffers), node, buffers
    )
    images, channels, height, width = map(typical, (*node.batch, *plane_sizes(node.positions)))
    return Problem(node.windows, images, channels, height, width, are_neighbours)


def weight_gradient_problem(
    node: DepthwiseWeightGradient, buffers: Mapping[str, Buffer]
) -> Problem:
    """Of the kernel of the gradient of a depthwise convolution's weight."""
    height, width = plane_sizes(node.positions)
    return Problem(
        node.windows,
        typical(node.images),
        typical(node.channels),
        typical(height),
        typical(width),
        gradient_has_neighbours(node, buffers),
        sums=True,
        parts=node.parts,
        factor=gcd(height.constant, *(coefficient for _, coefficient in height.terms)),
    )


def choose_depthwise_tiling(problem: Problem, target: Target) -> DepthwiseTiling:
    """The tiling that takes the least time by what accesses, multiply-adds and waiting cost."""
    best, least = None, 0.0
    for tiling in _candidates(problem, target):
        if workgroup_nbytes(tiling, problem.windows, problem.sums) > target.max_workgroup_nbytes:
            continue
        cost = _cost(tiling, problem, target)
        if best is None or cost < least:
            best, least = tiling, cost
    assert best is not None, problem  # windows fit tiles
    return best


def workgroup_nbytes(tiling: DepthwiseTiling, windows: ConvolutionWindows, sums: bool) -> int:
    """Workgroup memory of a tiling: the image's tile, and the taps or what adds up their sums."""
    tile = tiling.planes * image_tile(tiling, windows).plane
    if not sums:
        return 16 * tile + 4 * tiling.planes * taps_pitch(windows)
    return 16 * (max(tile, tiling.workgroup) + tiling.workgroup)


@dataclass(frozen=True, slots=True)
class TapSums:
    """How a workgroup adds up the sums of taps that its invocations have, in the tile's memory.

    Attributes:
        quads: fours of taps that are added up at a time.
        invocations: of a channel.
        segments: of those invocations, which are added up side by side, and then their sums.
    """

    quads: int
    invocations: int
    segments: int

    @property
    def segment(self) -> int:
        """Invocations of a segment."""
        return -(-self.invocations // self.segments)


def tap_sums(tiling: DepthwiseTiling, windows: ConvolutionWindows) -> TapSums:
    """How the sums of a weight's gradient are added up."""
    tile = max(tiling.planes * image_tile(tiling, windows).plane, tiling.workgroup)
    quads = min(-(-windows.taps // VECTOR), tile // tiling.workgroup)
    invocations = tiling.workgroup // tiling.channels
    segments = max(1, min(invocations // quads, isqrt(invocations)))
    return TapSums(quads, invocations, segments)


def taps_pitch(windows: ConvolutionWindows) -> int:
    """Elements from the weight of one plane to that of the next: an odd number, see `ImageTile`."""
    return windows.taps | 1


def _candidates(problem: Problem, target: Target) -> Iterator[DepthwiseTiling]:
    across, along = axes_of(problem.windows)
    vectors = along.phases
    columns = -(-problem.elements // (VECTOR * vectors))
    most = min(256, target.max_workgroup_invocations)
    longest = _MOST_ON_CPUS if target.software else _MOST_STATEMENTS
    for times in (4, 2, 1):
        rows = times * across.phases
        statements = rows * vectors * problem.windows.taps
        if times > 1 and (statements > longest or rows >= 2 * problem.lines):
            continue
        if problem.sums and problem.factor % rows:
            continue
        lines = -(-problem.lines // rows)
        for wide in _parts(columns, most):
            for high in _parts(lines, most // wide):
                alone = DepthwiseTiling(1, 1, high, wide, rows, vectors)
                yield from _with_planes(alone, problem, most)


def _with_planes(alone: DepthwiseTiling, problem: Problem, most: int) -> Iterator[DepthwiseTiling]:
    together = min(_NEIGHBOURS, problem.channels) if problem.neighbours else 1
    for power in range(most.bit_length()):
        planes = 1 << power
        channels = min(planes, together) if problem.sums else planes
        images = planes // channels
        few = images < 2 * problem.images
        if not problem.sums:
            few = planes < 2 * problem.channels * problem.images
        if not few or planes * alone.workgroup > most:
            return
        yield replace(alone, channels=channels, images=images)


def _parts(count: int, most: int) -> list[int]:
    """Numbers that divide a count into few runs, nearly evenly: the largest first."""
    fewest = -(-count // most)
    parts = [*range(fewest, fewest + 16)]
    while parts[-1] < count:  # where no tile of so few fits
        parts.append(2 * parts[-1])
    return list(dict.fromkeys(-(-count // number) for number in parts))


def _cost(tiling: DepthwiseTiling, problem: Problem, target: Target) -> float:
    """Multiply-adds that a multiprocessor could do until the last workgroup is done.

    Its workgroups take turns, but those that are resident wait for memory side by side.
    """
    workgroups, tiles = _workgroups(tiling, problem)
    tile = image_tile(tiling, problem.windows)
    loads = -(-tiling.planes * tile.lines * tile.quads // tiling.workgroup)
    lanes = -(-tiling.workgroup // _SUBGROUP) * _SUBGROUP
    sectors = _sectors(tiling, problem)
    each = tiles * _invocation_cost(tiling, problem, loads)
    waits = tiles * loads * sectors
    registers = _REGISTERS
    if problem.sums:
        each += _ADDING * problem.windows.taps
        waits += tiles  # for the other operand
        registers += problem.windows.taps
    machine = target.machine
    nbytes = workgroup_nbytes(tiling, problem.windows, problem.sums)
    resident = min(machine.registers // (registers * lanes), machine.workgroup_nbytes // nbytes)
    turns = -(-workgroups // machine.multiprocessors)
    waits *= -(-turns // max(1, resident))
    return turns * (lanes * each + _WORKGROUP) + waits * _WAIT


def _sectors(tiling: DepthwiseTiling, problem: Problem) -> float:
    """Sectors that a workgroup reads for each of those that it has all channels of."""
    if not problem.neighbours:
        return 1.0
    return max(1.0, min(_NEIGHBOURS, problem.channels) / tiling.channels)


def _workgroups(tiling: DepthwiseTiling, problem: Problem) -> tuple[int, int]:
    """How many workgroups there are, and how many tiles each goes through."""
    tiles = -(-problem.lines // (tiling.lines * tiling.rows))
    tiles *= -(-problem.elements // (VECTOR * tiling.vectors * tiling.columns))
    if not problem.sums:
        return tiles * -(-problem.images * problem.channels // tiling.planes), 1
    tiles *= -(-problem.images // tiling.images)
    channels = -(-problem.channels // tiling.channels)
    return channels * problem.parts, -(-tiles // problem.parts)


def _invocation_cost(tiling: DepthwiseTiling, problem: Problem, loads: int) -> float:
    """Multiply-adds of an invocation for a tile, and what its accesses take of their time."""
    windows = problem.windows
    across, along = axes_of(windows)
    first, last = across.reach(tiling.rows)
    start, end = along.reach(VECTOR * tiling.vectors)
    accesses: float = (last - first + 1) * (end // VECTOR - start // VECTOR + 1)
    if not problem.sums:
        accesses += windows.taps / VECTOR
    access: float = _ACCESS
    if problem.neighbours:
        access += _NEIGHBOUR_ACCESS * _sectors(tiling, problem)
    results = tiling.rows * tiling.vectors
    products = VECTOR * results * windows.taps / (across.phases * along.phases)
    return max(products, _TILE_ACCESS * accesses) + access * (loads + results)
