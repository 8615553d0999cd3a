"""Work distribution as data: how many invocations share what, per kernel template."""

from __future__ import annotations

from dataclasses import dataclass

from ..sizes import Expr
from ..target import Target
from .index_wgsl import is_multiple_of
from .storage import VECTOR


def power_of_two_at_least(n: int) -> int:
    """The smallest power of two ≥ n."""
    return 1 << max(0, (n - 1).bit_length())


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How a workgroup covers rows of a reduction.

    Attributes:
        threads: invocations that share a row (a power of two).
        rows: rows per workgroup.
        elements_fast: neighbouring invocations take neighbouring elements of a row (else
            neighbouring rows: for reductions over columns).
        lanes: neighbouring elements that an invocation loads at once (1 or 4).
        chunks: times that an invocation's share covers the row when it is kept in registers; None
            for a loop that reads memory again in every phase.
        unroll: shares per iteration of that loop, so that their loads are in flight together.
    """

    threads: int
    rows: int
    elements_fast: bool
    lanes: int
    chunks: int | None
    unroll: int = 4

    @property
    def workgroup(self) -> int:
        return self.threads * self.rows


# Registers per invocation that a row may occupy: 32 f32 values still leave 4 workgroups of 256
# resident per multiprocessor on an H200 (65,536 registers).
_ROW_REGISTERS = 32


def choose_row_tiling(
    rows: Expr,
    length: Expr,
    elements_fast: bool,
    target: Target,
    several_phases: bool,
    vector: int = VECTOR,
) -> RowTiling:
    """The tiling for ``rows`` rows of ``length`` elements, of which ``vector`` may be one load.

    A single reduction reads its row once, so long rows loop; with several phases the row is kept in
    registers when it fits.
    """
    limit = min(target.max_workgroup_invocations, 256)
    if not elements_fast:
        return _column_tiling(rows, length, limit)
    lanes = vector if is_multiple_of(length, vector) else 1
    if not length.is_constant:
        return RowTiling(min(128, limit), 1, True, lanes, None)
    vectors = -(-int(length) // lanes)
    threads = min(limit, power_of_two_at_least(-(-vectors // 4)))
    if vectors > 16 * limit and target.max_workgroup_invocations >= 1024:
        threads = 1024
    share = max(1, limit // threads)
    if rows.is_constant:
        share = min(share, power_of_two_at_least(int(rows)))
    chunks: int | None = -(-vectors // threads)
    assert chunks is not None
    if chunks * lanes > _ROW_REGISTERS or (not several_phases and chunks > 8):
        chunks = None
    return RowTiling(threads, share, True, lanes, chunks)


def _column_tiling(rows: Expr, length: Expr, limit: int) -> RowTiling:
    count = int(rows) if rows.is_constant else 1 << 16
    n = int(length) if length.is_constant else 256
    threads = 1
    while threads < 16 and threads * 8 <= n and count * threads < (1 << 17):
        threads *= 2
    share = max(1, min(limit // threads, power_of_two_at_least(count)))
    chunks = -(-n // threads)
    keep = length.is_constant and chunks <= 16
    return RowTiling(threads, share, False, 1, chunks if keep else None)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How a workgroup covers queries and keys.

    Attributes:
        queries: per workgroup. Their tile stays in workgroup memory.
        keys: per step and slice; keys and values take turns in a second tile.
        thread_rows: queries of an invocation (4 or 8), which computes their scores with 4 keys.
        slices: groups of invocations that take turns with the key tiles (a power of two).
    """

    queries: int
    keys: int
    thread_rows: int = 4
    slices: int = 1

    @property
    def workgroup(self) -> int:
        return self.slices * self.queries * self.keys // (4 * self.thread_rows)

    def other_size(self, head: int, value_head: int) -> int:
        """vec4s of a slice's second tile, which also hands its results to another slice."""
        threads = self.keys // 4
        size = self.keys * max(head, value_head) // 4
        own = -(-value_head // 4 // threads)
        return max(size, self.queries * own * threads) if self.slices > 1 else size

    def workgroup_nbytes(self, head: int, value_head: int) -> int:
        """Workgroup memory in bytes for these head sizes (rounded up to 4)."""
        scores = self.queries * self.keys + self.queries * self.keys // 4
        floats = head * self.queries
        floats += self.slices * (4 * self.other_size(head, value_head) + scores)
        return 4 * floats + 8


# Best first. On an H200, 8 rows per invocation leave too few invocations to hide the loads of a
# tile (1.6 times slower), and slices pay only where there is no other parallelism.
_ATTENTION_TILINGS = (
    AttentionTiling(64, 32),
    AttentionTiling(32, 32),
    AttentionTiling(32, 16),
    AttentionTiling(16, 16),
)
_ATTENTION_FEW = (
    AttentionTiling(4, 32, slices=8),
    AttentionTiling(4, 32, slices=4),
    AttentionTiling(4, 16, slices=4),
    AttentionTiling(8, 8),
    AttentionTiling(4, 4),
)


def choose_attention_tiling(
    queries: Expr, head: int, value_head: int, target: Target
) -> AttentionTiling | None:
    """The first tiling that fits and does not waste most of its queries; None if none fits."""
    few = int(queries) if queries.is_constant else 64
    wanted = list(_ATTENTION_FEW)
    if few > 4:
        wanted[:0] = [t for t in _ATTENTION_TILINGS if t.queries < 2 * few or t.queries <= 16]
    for tiling in wanted:
        fits = tiling.workgroup_nbytes(head, value_head) <= target.max_workgroup_nbytes
        if fits and tiling.workgroup <= target.max_workgroup_invocations:
            return tiling
    return None


@dataclass(frozen=True, slots=True)
class AttentionPartsTiling:
    """How a workgroup covers a part of the keys, for few queries.

    Attributes:
        lanes, value_lanes: vec4s of a key and of a value, one per invocation.
        rows: keys that are loaded side by side.
        unroll: keys of each row in flight at once.
    """

    lanes: int
    value_lanes: int
    rows: int
    unroll: int

    @property
    def width(self) -> int:
        """Invocations of a row."""
        return max(self.lanes, self.value_lanes)

    @property
    def workgroup(self) -> int:
        return self.width * self.rows

    @property
    def keys(self) -> int:
        """Keys per step."""
        return self.rows * self.unroll

    @property
    def workgroup_nbytes(self) -> int:
        """Workgroup memory of products, scores, sums and weights."""
        floats = self.keys * (self.lanes + 2) + self.rows * (4 * self.value_lanes + 1)
        return 4 * floats


def choose_attention_parts_tiling(
    lanes: int, value_lanes: int, target: Target
) -> AttentionPartsTiling | None:
    """About 128 invocations with 8 keys and values each in flight; None if a row does not fit."""
    width = max(lanes, value_lanes)
    rows = max(1, min(128, target.max_workgroup_invocations) // width)
    tiling = AttentionPartsTiling(lanes, value_lanes, rows, 8)
    fits = (
        tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes <= target.max_workgroup_nbytes
    )
    return tiling if fits else None
