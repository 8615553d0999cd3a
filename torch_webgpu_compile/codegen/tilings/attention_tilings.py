"""Work distribution of attention and its gradients, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ...ir.access import is_multiple_of
from ...ir.attention_nodes import AttentionGradient
from ...symbolic.sizes import Expr, ceildiv, magnitude
from ...target import Target


def grid_block(wide: int, high: int) -> int:
    """How wide blocks of 16 invocations are in a grid of so many parts of the work, 0 for none.

    In blocks, neighbours share rows, and those two apart share columns. NVIDIA reads vec4s of
    workgroup memory a quarter of a subgroup at a time, and two quarters at once where either holds.
    """
    return next((w for w in (8, 4) if wide % w == 0 and high % (16 // w) == 0), 0)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How a workgroup covers queries and keys.

    Attributes:
        queries: per workgroup. Their tile stays in workgroup memory.
        keys: per step and slice.
        thread_rows, thread_keys: an invocation computes the scores of this many queries with this
            many keys (4 or 8 each).
        slices: groups of invocations that take turns with the key tiles (a power of two).
    """

    queries: int
    keys: int
    thread_rows: int = 4
    thread_keys: int = 4
    slices: int = 1

    @property
    def slice_workgroup(self) -> int:
        """Invocations of a slice."""
        return self.queries * self.keys // (self.thread_rows * self.thread_keys)

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup: those of all slices."""
        return self.slices * self.slice_workgroup

    @property
    def sharing(self) -> int:
        """Invocations that share a query."""
        return self.keys // self.thread_keys

    def block(self, subgroup: int) -> int:
        """How wide blocks are in the grid of invocations, see `grid_block`.

        ``subgroup``: invocations that exchange values without workgroup memory, or 0: then those
        that share a query are in one.
        """
        found = grid_block(self.sharing, self.queries // self.thread_rows)
        most = _shuffles(found, self.sharing)
        return found if not subgroup or not most or most[-1] < subgroup else 0

    def shuffles(self, subgroup: int) -> tuple[int, ...]:
        """The bits in which the numbers of invocations that share a query differ."""
        return _shuffles(self.block(subgroup), self.sharing)

    def stays_within(self, name: str, count: Expr, row: Expr | None = None) -> bool:
        """Whether no load passes the end ``count`` of a coordinate: m, n, k or d.

        ``row``: elements that each n has, of a key or value.
        """
        step = {"m": self.queries, "n": self.keys * self.slices}.get(name, 4)
        vectors = self.keys * int(ceildiv(row, 4)) if row is not None else 0
        return is_multiple_of(count, step) and vectors % self.slice_workgroup == 0

    def keys_size(self, head: int) -> int:
        """vec4s of a slice's tile of keys, whose place the probabilities take later."""
        return self.keys // 4 * max(head, self.queries)

    def slice_size(self, head: int, value_head: int, subgroup: int) -> int:
        """vec4s of workgroup memory of a slice: keys, values, and what invocations exchange.

        ``subgroup``: invocations that exchange values without workgroup memory, or 0.
        """
        size = self.keys_size(head) + self.keys * value_head // 4
        if not subgroup:
            size += self.sharing * self.queries // 4
        votes = 1 + -(-self.workgroup // max(1, subgroup))
        results = 0
        if self.slices > 1:
            own = -(-value_head // 4 // self.sharing)
            results = self.slice_workgroup * (self.thread_rows * own + self.thread_rows // 2)
        return max(size, votes, results)

    def workgroup_nbytes(self, head: int, value_head: int, subgroup: int) -> int:
        """Workgroup memory in bytes for these head sizes (rounded up to 4)."""
        size = head * self.queries // 4
        size += self.slices * self.slice_size(head, value_head, subgroup)
        return 16 * size + (0 if subgroup else 4)


def _shuffles(block: int, sharing: int) -> tuple[int, ...]:
    """The bits of an invocation's number that are its place in a row, from the lowest."""
    bits = (1, 4, 8, 16, 32) if block == 8 else (1, 4, 16, 32) if block == 4 else (1, 2, 4, 8, 16)
    return bits[: sharing.bit_length() - 1]


# Best first, as measured on an H100: 16 heads of 64 with 1024 causal keys take 140 µs in the first
# (PyTorch's CUDA kernel: 145), 142 in the second, of half as many invocations, 163 and 167 in the
# next two. Slices pay only where there is no other parallelism.
_ATTENTION_TILINGS = (
    AttentionTiling(64, 64),
    AttentionTiling(64, 64, thread_rows=8),
    AttentionTiling(64, 32),
    AttentionTiling(32, 32),
    AttentionTiling(32, 16),
    AttentionTiling(16, 16),
)
# Where tiles of 64 queries are fewer than multiprocessors. On an H100, 192 of them, of 4×12 heads
# of 64 with 256 causal keys, take 38 µs, and twice as many of these 42.
_ATTENTION_FEW_TILES = AttentionTiling(32, 64)
_ATTENTION_FEW = (
    AttentionTiling(4, 32, slices=8),
    AttentionTiling(4, 32, slices=4),
    AttentionTiling(4, 16, slices=4),
    AttentionTiling(8, 8),
    AttentionTiling(4, 4),
)
# A core runs slices one after the other: one query of 8 heads of 64 with 2048 keys takes lavapipe
# 37 ms, and 59 with four slices; LLVM compiles half as long.
_ATTENTION_FEW_ON_CPUS = AttentionTiling(4, 32)


def choose_attention_tiling(
    heads: Expr, queries: Expr, head: int, value_head: int, target: Target
) -> AttentionTiling | None:
    """The first tiling that fits and does not waste most of its queries; None if none fits.

    ``heads``: of the whole batch.
    """
    known = magnitude(queries)
    few = 64 if known is None else known
    wanted = [*([_ATTENTION_FEW_ON_CPUS] * target.software), *_ATTENTION_FEW]
    if few > 4:
        wanted[:0] = [t for t in _ATTENTION_TILINGS if t.queries < 2 * few or t.queries <= 16]
    tiles = magnitude(heads * ceildiv(queries, 64))
    are_few = tiles is not None and tiles < target.machine.multiprocessors
    if are_few and few > 32 and not target.software:
        wanted.insert(0, _ATTENTION_FEW_TILES)
    for tiling in wanted:
        subgroup = attention_subgroup(tiling, target)
        fits = tiling.workgroup_nbytes(head, value_head, subgroup) <= target.max_workgroup_nbytes
        if fits and tiling.workgroup <= target.max_workgroup_invocations:
            return tiling
    return None


def attention_subgroup(tiling: AttentionTiling, target: Target) -> int:
    """Invocations that exchange values by shuffles: a subgroup, or 0 where that is not certain."""
    size = target.subgroup_size
    return size if size >= tiling.sharing and tiling.workgroup % max(1, size) == 0 else 0


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
        """Invocations of a workgroup."""
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


# -- gradients -------------------------------------------------------------------------------------


def gradient_work(node: AttentionGradient) -> tuple[Expr, Expr, Expr]:
    """(rows that are owned, rows that are walked over, heads of the batch that own rows)."""
    batch, heads, group, queries, keys, *_ = node.sizes
    if node.of == "keys":
        return keys, queries, batch * heads
    return queries, keys, batch * heads * group


@dataclass(frozen=True, slots=True)
class AttentionGradientTiling:
    """How a workgroup covers the rows that it owns, and those that it walks over.

    It owns keys and walks over queries for the gradients of keys and values, and the other way
    round for the gradient of queries. Every pair of rows has a score. An invocation computes scores
    of some of the rows that the workgroup owns, and later sums for as many of them.

    Attributes:
        owned: rows whose gradients a workgroup computes (a power of two, at least 4).
        walked: rows per step (a power of two, at least 4).
        thread_walked: an invocation computes the scores of four owned rows with this many.
        workgroup: invocations; not all of them have scores to compute.
        unroll: vec4s of a head per iteration where scores are computed, if they divide it.
        direct: whether owned rows stay in memory, and so in its caches, when scores are computed.
    """

    owned: int
    walked: int
    thread_walked: int
    workgroup: int
    unroll: int = 2
    direct: bool = False

    head_step: ClassVar[int] = 4  # elements of a head that loads take together

    @property
    def scoring(self) -> int:
        """Invocations that compute scores."""
        return self.owned * self.walked // (4 * self.thread_walked)

    @property
    def columns(self) -> int:
        """Invocations that share the sums of the same rows, each for other elements of heads."""
        return self.workgroup * 4 // self.owned

    @property
    def scoring_block(self) -> int:
        """How wide blocks are in the grid of invocations that compute scores: see `grid_block`."""
        return grid_block(self.walked // self.thread_walked, self.owned // 4)

    @property
    def summing_block(self) -> int:
        """How wide blocks are in the grid of invocations that compute sums."""
        return grid_block(self.columns, self.owned // 4)

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """An invocation's owned rows, from the first one's number.

        They are a quarter of the tile apart, so that neighbouring invocations read neighbouring
        rows, from different banks.
        """
        return tuple(i * self.owned // 4 for i in range(4))

    def outer_tile_vec4s(self, width: int) -> int:
        """vec4s in workgroup memory of the owned rows, the outer tile, ``width`` vec4s wide."""
        return 0 if self.direct else self.owned * width

    def inner_tile_vec4s(self, width: int) -> int:
        """vec4s in workgroup memory of a step's rows, the inner tile, ``width`` vec4s wide.

        Weights and gradients of scores, ``owned`` numbers for each of its rows, take the place of
        the tile when it has been read, so that workgroup memory need not hold both.
        """
        return self.walked * max(width, self.owned // 4)

    def workgroup_nbytes(self, width: int, value_width: int) -> int:
        """Workgroup memory in bytes, of heads that are so many vec4s wide."""
        widths = (width, value_width)
        return 16 * sum(self.outer_tile_vec4s(w) + self.inner_tile_vec4s(w) for w in widths)


# From the most arithmetic per load to the least memory. The first two of them for heads of 64 take
# 48 KiB, and 32 KiB the fourth for heads of 128; the last one fits the 16 KiB of every adapter with
# heads of 256. On an H100, with 16 heads of 64 and 1024 causal keys, the first takes 328 µs with
# half as many vec4s per iteration (PyTorch's CUDA kernels: 317), the second 358; with 16 heads of
# 128 and 512 causal keys, the fourth takes 298 µs (CUDA: 177), the fifth 351.
_GRADIENT_TILINGS = (
    AttentionGradientTiling(64, 32, 4, 128, unroll=4),
    AttentionGradientTiling(32, 64, 4, 128, unroll=4),
    AttentionGradientTiling(32, 32, 2, 128),
    AttentionGradientTiling(32, 32, 2, 128, direct=True),
    AttentionGradientTiling(32, 16, 2, 64),
    AttentionGradientTiling(16, 16, 2, 32),
    AttentionGradientTiling(16, 8, 1, 64),
    AttentionGradientTiling(8, 8, 1, 32),
    AttentionGradientTiling(4, 4, 1, 32),
)
# Below this many rows per workgroup, smaller tiles load more than parallelism gains.
_FEWEST_OWNED = 32


def choose_attention_gradient_tiling(
    rows: Expr, batch: Expr, width: int, value_width: int, target: Target
) -> AttentionGradientTiling | None:
    """The first tiling that fits, wastes few rows and makes enough workgroups; None if none fits.

    Args:
        rows: that a head owns.
        batch: heads that own rows, of the whole batch.
        width, value_width: vec4s of a row of the query or key, and of the value.
    """
    fitting = [
        tiling
        for tiling in _GRADIENT_TILINGS
        if tiling.workgroup_nbytes(width, value_width) <= target.max_workgroup_nbytes
        and tiling.workgroup <= target.max_workgroup_invocations
    ]
    wanted = target.machine.multiprocessors
    known, heads = magnitude(rows), magnitude(batch)
    count = max(t.owned for t in _GRADIENT_TILINGS) if known is None else known
    heads = wanted if heads is None else heads
    for tiling, smaller in pairwise(fitting):
        wasteful = tiling.owned >= 2 * count
        few = heads * -(-count // tiling.owned) < wanted
        if not wasteful and not (few and tiling.owned > smaller.owned >= _FEWEST_OWNED):
            return tiling
    return fitting[-1] if fitting else None
