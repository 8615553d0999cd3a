"""How rows of packed weights are multiplied by integers: a strategy of row groups.

The factor that all rows share becomes integers first, in workgroup memory: chunk by chunk, as
multiples of a unit that is a power of two, in `PLANES` planes of a byte each. A lane of a row then
loads the words of a chunk, takes four levels from a word at once, and adds their products with the
bytes of each plane by one operation. Scale and offset are applied to the sums of a chunk. On an
H200 the products of an int4 weight of 8192 × 2048 take 6.3 µs so, and 9.4 of levels as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..symbolic.sizes import product
from ..target import Target
from .buffers import Buffer
from .graph import RowGroup
from .packed_levels import CHUNK
from .packed_sums import PackedSum, PackedSums, packed_sums
from .workgroup_memory import WorkgroupArray

PLANES = 3
"""Bytes of an integer: 2 or 3. With 3, it has the digits of a float32, but for the last one."""

SHARE = 8
"""Elements of the factor that an invocation turns into integers, of a chunk that several do."""

LANES, MOST_LANES = 32, 128
"""Invocations that share a row: the fewest, unless there are fewer chunks; the most of few rows."""

WORKGROUP = 256
"""Invocations of a workgroup, at most: all of them use the same integers."""

ROWS_BY_WIDTH = {4: 4, 8: 1}
"""The most rows that an invocation takes, by the bits of a level: powers of two."""

MOST_SUMS = 8
"""Sums that an invocation computes at a time, of all its rows and products."""

_LEAST_ROWS = 256
_LEAST_CHUNKS = 4

_NBYTES = 32 << 10
"""Workgroup memory, at most: with more, fewer workgroups are resident."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """How a workgroup multiplies rows of packed weights.

    Attributes:
        found: the sums.
        lanes: invocations that share a row, a power of two.
        rows_each: rows that they compute together, which read the factor's integers once.
        block: chunks of the factor that are in workgroup memory at a time.
        share: elements of a chunk that one invocation turns into integers: `SHARE` where those
            of a chunk exchange by shuffles, else all.
    """

    found: PackedSums
    lanes: int
    rows_each: int
    block: int
    share: int

    @property
    def group(self) -> int:
        """Elements whose integers are summed up for an offset."""
        return min(found.group for found in self.found.sums)

    @property
    def has_offsets(self) -> bool:
        """Whether the sums of the factor's integers are needed."""
        return any(map(needs_sum, self.found.sums))

    def arrays(self) -> dict[str, WorkgroupArray]:
        """What is in workgroup memory, by name.

        Integers are in pairs of words, for `SHARE` elements of one plane; pairs of the same place
        in their chunks are side by side.
        """
        pairs = PLANES * CHUNK // SHARE * self.block
        found = {
            "integers": WorkgroupArray("vec2<u32>", pairs, 8),
            "units": WorkgroupArray("f32", self.block, 4),
        }
        if self.has_offsets:
            found["totals"] = WorkgroupArray("f32", CHUNK // self.group * self.block, 4)
        if self.found.statistics:
            length = len(self.found.statistics) * self.block
            found["statistics"] = WorkgroupArray("f32", length, 4)
        return found


def needs_sum(found: PackedSum) -> bool:
    """Whether a sum needs that of the factor's integers: for an offset, or a zero of levels."""
    return found.offset is not None or found.zero != center(found)


def center(found: PackedSum) -> int:
    """What is taken from levels where they are extracted: half of the range makes signed bytes."""
    levels = found.levels
    half = 1 << (levels.width - 1)
    return half if not levels.signed and (found.zero == half or levels.width == 8) else 0


def choose_packed_rows(
    group: RowGroup, buffers: Mapping[str, Buffer], target: Target
) -> PackedRows | None:
    """The strategy for a group of one pass that stores no elements; None where it is of no use."""
    rows, length = product(group.rows), product(group.elements)
    if not rows.is_constant or not length.is_constant or int(rows) < _LEAST_ROWS:
        return None
    chunks = int(length) // CHUNK
    if chunks < _LEAST_CHUNKS:
        return None
    found = packed_sums(group, buffers)
    if found is None:
        return None
    lanes, rows_each = _lanes_and_rows(int(rows), chunks, found, target)
    subgroup = target.subgroup_size
    share = SHARE if subgroup * SHARE >= CHUNK else CHUNK
    whole = PackedRows(found, lanes, rows_each, chunks, share)
    block = _block(whole, target, 0 if subgroup >= lanes else workgroup(target))
    return None if block is None else replace(whole, block=block)


def workgroup(target: Target) -> int:
    """Invocations of a workgroup."""
    return min(WORKGROUP, target.max_workgroup_invocations)


def _lanes_and_rows(rows: int, chunks: int, found: PackedSums, target: Target) -> tuple[int, int]:
    """The most rows for an invocation with which there are enough workgroups, and lanes of a row.

    Where rows are few, more lanes share one: a scale's neighbours are often of other rows, and are
    loaded with it.
    """
    width = max(own.levels.width for own in found.sums)
    each = max(count for bits, count in ROWS_BY_WIDTH.items() if width <= bits)
    most = min(MOST_LANES, 1 << (chunks.bit_length() - 1), workgroup(target))
    least = min(LANES, most)
    wanted = _wanted(target) * workgroup(target)
    while each > 1:
        if rows % each == 0 and each * len(found.sums) <= MOST_SUMS:
            for lanes in _powers(least, most):
                if rows * lanes >= wanted * each:
                    return lanes, each
        each //= 2
    return least if rows * least >= wanted else most, 1


def _powers(first: int, last: int) -> list[int]:
    """The powers of two from one to another."""
    return [1 << k for k in range(first.bit_length() - 1, last.bit_length())]


def _wanted(target: Target) -> int:
    """Workgroups: two for each multiprocessor, but for a few that may be idle.

    One makes integers while the other waits for weights: on an H200 the best of 2048 × 8192 has
    128 lanes and four rows, of 2048 × 2048 64 and two, of 8192 × 2048 32 and four.
    """
    return target.machine.multiprocessors * 7 // 4


def _block(whole: PackedRows, target: Target, exchanging: int) -> int | None:
    """Chunks of a block, of which all of a row fill as few as they can.

    Args:
        exchanging: invocations that exchange accumulators through workgroup memory.
    """
    chunks, lanes = whole.block, whole.lanes
    accumulators = len(whole.found.sums) * whole.rows_each + len(whole.found.statistics)
    limit = min(_NBYTES, target.max_workgroup_nbytes) - 4 * exchanging * accumulators
    each = sum(array.nbytes for array in whole.arrays().values()) // chunks
    most = limit // each // lanes * lanes
    if most < lanes:
        return None
    blocks = -(-chunks // most)
    return min(chunks, -(-chunks // (blocks * lanes)) * lanes)
