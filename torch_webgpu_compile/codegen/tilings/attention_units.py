"""How attention is tiled for matrix units: the tilings to choose from, and the choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...ir.access import is_multiple_of
from ...symbolic.sizes import Expr, ceildiv, magnitude
from ...target import MatrixConfig, Target
from .units import PADDING_NBYTES, InUnits, Unit, dialect_of

SHARING = 4
"""Invocations of a subgroup that have a row of scores together."""


_STAGED = 32
_FLAGS = 12  # words of workgroup memory for what invocations tell each other


@dataclass(frozen=True, slots=True)
class RowsInUnits(InUnits):
    """The common part of tilings in which each subgroup has rows of units of scores.

    Attributes:
        subgroups: of a workgroup.
    """

    subgroups: int

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup."""
        return self.subgroups * self.lanes

    @property
    def turns(self) -> int:
        """How often the invocations of a subgroup pass over a unit to have all of its rows."""
        return SHARING * self.unit.m // self.lanes

    def are_shared(self, columns: int) -> bool:
        """Whether units fill rows of so many scores, and invocations share them as they have to."""
        whole = columns % math.lcm(self.unit.n, self.unit.k, SHARING) == 0
        return whole and self.turns * self.lanes == SHARING * self.unit.m > 0

    def line(self, size: int) -> int:
        """Elements from a line of ``size`` factors to the next one."""
        return size + PADDING_NBYTES // self.itemsize


@dataclass(frozen=True, slots=True)
class AttentionUnitsTiling(RowsInUnits):
    """A tile of queries per workgroup, of which each subgroup has some rows.

    Attributes:
        row_units: units of queries of a subgroup.
        keys: per step.
        scored: units of queries of a subgroup whose scores are in workgroup memory at once.
    """

    row_units: int
    keys: int
    scored: int

    @property
    def queries(self) -> int:
        """Queries of a workgroup."""
        return self.subgroups * self.row_units * self.unit.m

    @property
    def rows_of_invocation(self) -> int:
        """Rows of scores that an invocation has a part of."""
        return self.row_units * self.turns

    @property
    def is_whole(self) -> bool:
        """Whether units fill the tiles, and invocations share rows as they have to."""
        return self.are_shared(self.keys) and self.row_units % self.scored == 0

    def widths(self, head: int, value_head: int) -> tuple[int, int]:
        """Head sizes rounded up to units."""
        k, n = self.unit.k, self.unit.n
        return -(-head // k) * k, -(-value_head // n) * n

    def stays_within(self, name: str, count: Expr, _row: Expr | None = None) -> bool:
        """Whether no load passes the end ``count`` of a coordinate: m, n, k or d."""
        steps = {"m": self.queries, "n": self.keys, "k": self.unit.k, "d": self.unit.n}
        return is_multiple_of(count, steps[name])

    @property
    def score_line(self) -> int:
        """Elements from a row of scores to the next one."""
        return self.keys + PADDING_NBYTES // 4

    @property
    def scores_size(self) -> int:
        """Scores that are in workgroup memory at once, with what is between them."""
        return self.subgroups * self.scored * self.unit.m * self.score_line

    def keys_size(self, head: int) -> int:
        """Factors of the tile of keys, whose place the probabilities take later."""
        return max(self.keys * self.line(head), self.queries * self.line(self.keys))

    def staged(self, head: int) -> int:
        """Elements of each query that are in workgroup memory at once, on their way to matrices."""
        return min(head, -(-_STAGED // self.unit.k) * self.unit.k)

    def queries_at(self, head: int, value_head: int, are_kept: bool) -> int:
        """The start of the queries: behind the other tiles if they stay, else 0, in their place."""
        return self.keys_size(head) + self.keys * self.line(value_head) if are_kept else 0

    def tiles_size(self, head: int, value_head: int, queries_are_kept: bool) -> int:
        """Factors of all tiles."""
        staged = self.staged(head)
        parts = -(-head // staged) if queries_are_kept else 1
        last = self.queries_at(head, value_head, queries_are_kept)
        last += parts * self.queries * self.line(staged)
        return max(last, self.queries_at(head, value_head, True))

    def workgroup_nbytes(self, head: int, value_head: int, queries_are_kept: bool) -> int:
        """Workgroup memory, for these head sizes (whole units)."""
        tiles = self.tiles_size(head, value_head, queries_are_kept) * self.itemsize
        extra = self.workgroup if queries_are_kept else 0
        return tiles + 4 * (self.scores_size + extra + _FLAGS)

    def registers(self, head: int, value_head: int) -> int:
        """32-bit registers of an invocation for matrices and for what it fetches."""
        factors, (m, n) = 4 // self.itemsize, (self.unit.m, self.unit.n)
        rows = self.row_units * m
        sums = rows * value_head + rows * self.keys
        halves = rows * head + max(m, n) * self.unit.k + n * self.unit.k
        fetched = self.keys * (head + value_head) // (factors * self.workgroup)
        return (sums + halves // factors) // self.lanes + fetched


# (subgroups, units of queries of each, keys per step, units scored at once), best first, with the
# workgroups of an H200 that make each worth while.
_SHAPES = (
    ((4, 2, 32, 1), 132),
    ((8, 1, 32, 1), 132),
    ((4, 1, 64, 1), 132),
    ((4, 1, 32, 1), 0),
    ((2, 1, 32, 1), 0),
)
_MOST_REGISTERS = 168  # of 255, which addresses and a row's scores need too
_FEWEST_QUERIES = 17


def choose_attention_units_tiling(
    heads: Expr, queries: Expr, sizes: tuple[int, int], config: MatrixConfig, target: Target
) -> AttentionUnitsTiling | None:
    """The first tiling that fits, wastes few queries and makes enough workgroups; else None.

    Args:
        heads: of the whole batch.
        sizes: of a head of the queries and keys, and of the values.
    """
    count = magnitude(queries)
    if count is not None and count < _FEWEST_QUERIES:
        return None
    factor, _, *unit = config
    for shape, wanted in _SHAPES:
        tiling = AttentionUnitsTiling(Unit(*unit), factor, target.subgroup_size, *shape)
        tiles = magnitude(heads * ceildiv(queries, tiling.queries))
        few = tiles is not None and tiles < target.machine.scaled(wanted)
        wasteful = count is not None and tiling.queries >= 2 * count
        if not few and not wasteful and attention_units_fit(tiling, sizes, target):
            return tiling
    return None


def attention_units_fit(
    tiling: AttentionUnitsTiling, sizes: tuple[int, int], target: Target
) -> bool:
    """Whether a tiling can compute heads of these sizes within the target's limits."""
    if not tiling.is_whole:
        return False
    widths, are_kept = tiling.widths(*sizes), dialect_of(target) == "lanes"
    return (
        tiling.registers(*widths) <= _MOST_REGISTERS
        and tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(*widths, are_kept) <= target.max_workgroup_nbytes
    )


# -- gradients -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionGradientUnitsTiling(RowsInUnits):
    """A tile of rows that a workgroup owns, see `AttentionGradientTiling`: a unit per subgroup.

    Attributes:
        walked: rows per step.
    """

    walked: int

    @property
    def owned(self) -> int:
        """Rows whose gradients a workgroup computes."""
        return self.subgroups * self.unit.m

    @property
    def head_step(self) -> int:
        """Elements of a head that loads take together."""
        return math.lcm(self.unit.k, self.unit.n)

    @property
    def is_whole(self) -> bool:
        """Whether units fill the tiles, and invocations share rows as they have to."""
        return self.are_shared(self.walked)

    def widths(self, head: int, value_head: int) -> tuple[int, int]:
        """Head sizes rounded up to units."""
        step = self.head_step
        return -(-head // step) * step, -(-value_head // step) * step

    @property
    def score_line(self) -> int:
        """Elements from a row of scores to the next one."""
        return self.walked + PADDING_NBYTES // 4

    @property
    def scores_size(self) -> int:
        """Scores that are in workgroup memory at once, with what is between them."""
        return self.owned * self.score_line

    def places(
        self, head: int, value_head: int, by_keys: bool, owned_are_kept: bool
    ) -> dict[str, int]:
        """The start of each tile of factors, and the ``end`` of all.

        Gradients of queries need no weights. If the owned tiles are not kept, each is in the place
        of others for a while.
        """
        weights = self.owned * self.line(self.walked)
        places = {"walked": 0, "walked_values": self.walked * self.line(head)}
        places["weights"] = places["walked_values"] + self.walked * self.line(value_head)
        places["changes"] = places["weights"] + (weights if by_keys else 0)
        end = places["changes"] + weights
        places["owned"] = end if owned_are_kept else 0
        places["owned_values"] = end + self.owned * self.line(head) if owned_are_kept else 0
        last = max(
            places["owned"] + self.owned * self.line(head),
            places["owned_values"] + self.owned * self.line(value_head),
        )
        places["end"] = max(end, last)
        return places

    def workgroup_nbytes(
        self, head: int, value_head: int, by_keys: bool, owned_are_kept: bool
    ) -> int:
        """Workgroup memory, for these head sizes (whole units)."""
        tiles = self.places(head, value_head, by_keys, owned_are_kept)["end"]
        return tiles * self.itemsize + 4 * self.scores_size

    def registers(self, head: int, value_head: int, by_keys: bool) -> int:
        """32-bit registers of an invocation for matrices, scores and what it fetches."""
        factors, unit = 4 // self.itemsize, self.unit
        sums = unit.m * (head + (value_head if by_keys else 0) + 3 * self.walked)
        halves = unit.m * (head + value_head) + 2 * unit.n * unit.k
        fetched = self.walked * (head + value_head) // (factors * self.workgroup)
        return (sums + halves // factors) // self.lanes + fetched


# (subgroups, walked rows), best first.
_GRADIENT_SHAPES = ((8, 32), (4, 32), (8, 16), (4, 16), (2, 32), (2, 16))


def choose_attention_gradient_units_tiling(
    owned: Expr,
    heads: Expr,
    sizes: tuple[int, int],
    by_keys: bool,
    config: MatrixConfig,
    target: Target,
) -> AttentionGradientUnitsTiling | None:
    """The first tiling that fits, wastes few rows and makes enough workgroups; else None.

    Args:
        owned: rows of a head that gradients are computed of.
        heads: that own rows, of the whole batch.
        sizes: of a head of the queries and keys, and of the values.
        by_keys: whether keys are owned.
    """
    count = magnitude(owned)
    if count is not None and count < _FEWEST_QUERIES:
        return None
    factor, _, *unit = config
    fitting = [
        tiling
        for tiling in (
            AttentionGradientUnitsTiling(Unit(*unit), factor, target.subgroup_size, *shape)
            for shape in _GRADIENT_SHAPES
        )
        if attention_gradient_units_fit(tiling, sizes, by_keys, target)
    ]
    for tiling in fitting:
        tiles = magnitude(heads * ceildiv(owned, tiling.owned))
        few = tiles is not None and tiles < target.machine.multiprocessors
        wasteful = count is not None and tiling.owned >= 2 * count
        if not few and not wasteful:
            return tiling
    return min(fitting, key=lambda tiling: tiling.owned, default=None)


def attention_gradient_units_fit(
    tiling: AttentionGradientUnitsTiling, sizes: tuple[int, int], by_keys: bool, target: Target
) -> bool:
    """Whether a tiling can compute heads of these sizes within the target's limits."""
    if not tiling.is_whole:
        return False
    widths, are_kept = tiling.widths(*sizes), dialect_of(target) == "lanes"
    return (
        tiling.registers(*widths, by_keys) <= _MOST_REGISTERS
        and tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(*widths, by_keys, are_kept) <= target.max_workgroup_nbytes
    )
