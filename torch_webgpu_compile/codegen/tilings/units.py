"""How contractions are tiled for matrix units: the tilings to choose from, and the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir.access import VECTOR
from ...target import MATRIX_KERNELS, MatrixConfig, Target
from .matmul import MatmulProblem

_NBYTES = {"f16": 2, "bf16": 2, "f32": 4}
_PADDING_NBYTES = 16  # between lines of a tile, which start in other banks then; all are aligned

MOST_MISSED = 64
"""Elements of bfloat16 outside of f16's range that a tile's sums are corrected for.

A tile with more is computed again. Of normally distributed numbers, every 10⁸th is one.
"""
BFLOAT16_NBYTES = 8 * MOST_MISSED + 28
"""Workgroup memory of what is known of elements' exponents."""
BFLOAT16_PASSES = 9 * 9 + 1
"""The most passes over its operands that a tile of bfloat16 takes, after the first one.

The 254 exponents of each operand are in ranges of 30, one of each operand in a pass; another one is
for infinities and NaN.
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """What a subgroup multiplies at once: m × k elements by k × n."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class UnitsTiling:
    """A tile of a contraction's result per workgroup, of which each subgroup computes a part.

    Attributes:
        unit: of the matrix units.
        factor: what is multiplied, ``f16``, ``f32``, or ``bf16``: by units of f16, see
            ``bfloat16_units.wgsl.jinja``. Sums are f32.
        lanes: invocations of a subgroup.
        rows, columns, inner: the workgroup's tile, elements.
        subgroups_m, subgroups_n: how many subgroups share its rows, and its columns.
        buffers: 2: the next tile is stored beside the one that is multiplied; 1: after it.
        drained: units of a row that a subgroup stores to workgroup memory at once.
        swizzle: row tiles that consecutive workgroups share before the next column tile.
    """

    unit: Unit
    factor: str
    lanes: int
    rows: int
    columns: int
    inner: int
    subgroups_m: int
    subgroups_n: int
    buffers: int
    drained: int = 1
    swizzle: int = 8

    strips: ClassVar[int] = 0

    @property
    def type(self) -> str:
        """The WGSL type of what is multiplied."""
        return "f16" if self.factor == "bf16" else self.factor

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup."""
        return self.subgroups_m * self.subgroups_n * self.lanes

    @property
    def units_m(self) -> int:
        """Rows of units of a subgroup."""
        return self.rows // (self.subgroups_m * self.unit.m)

    @property
    def units_n(self) -> int:
        """Columns of units of a subgroup, of both products of a pair."""
        return self.columns // (self.subgroups_n * self.unit.n)

    @property
    def is_whole(self) -> bool:
        """Whether units fill the parts of subgroups."""
        whole_m = self.units_m * self.subgroups_m * self.unit.m == self.rows > 0
        whole_n = self.units_n * self.subgroups_n * self.unit.n == self.columns > 0
        return whole_m and whole_n and self.inner % self.unit.k == 0

    def line(self, axis: str, size: int) -> int:
        """Elements from a line of an operand's tile to the next one.

        Lines go along what neighbours are loaded along: the inner dimension, or the other one,
        which has ``size`` elements.
        """
        return (self.inner if axis == "inner" else size) + _PADDING_NBYTES // _NBYTES[self.factor]

    def numel(self, axis: str, size: int) -> int:
        """Elements of an operand's tile."""
        return self.line(axis, size) * (size if axis == "inner" else self.inner)

    def sums(self, paired: bool) -> int:
        """Results that are in workgroup memory at once."""
        each = self.unit.m * self.unit.n * self.drained * (2 if paired else 1)
        return self.subgroups_m * self.subgroups_n * each

    def slots(self, paired: bool) -> int:
        """Fours of results that an invocation takes from workgroup memory in the end."""
        products = 2 if paired else 1
        quads = -(-self.unit.m * self.unit.n * self.drained // (VECTOR * self.lanes))
        return products * self.units_m * (self.units_n // (products * self.drained)) * quads

    def workgroup_nbytes(self, axes: Sequence[str], paired: bool) -> int:
        """Workgroup memory. ``axes``: along which the tiles of lhs and rhs are loaded."""
        tiles = self.numel(axes[0], self.rows) + self.numel(axes[1], self.columns)
        own = BFLOAT16_NBYTES if self.factor == "bf16" else 0
        return self.buffers * tiles * _NBYTES[self.factor] + 4 * self.sums(paired) + own


# (rows, columns, subgroups along each) by falling size, with the workgroups of an H200 that make
# each worth while: one and a half per multiprocessor.
_BY_SIZE = (((128, 128), (2, 2), 200), ((64, 128), (1, 4), 100), ((64, 64), (2, 2), 0))
_INNER = 32


def unit_config(factor: str, target: Target) -> MatrixConfig | None:
    """The largest configuration of a target that multiplies a type, of those with kernels.

    ``factor``: as in `UnitsTiling`.
    """
    type = "f16" if factor == "bf16" else factor
    if not target.subgroup_size:
        return None
    usable = [
        config
        for config in target.subgroup_matrix_configs
        if config in MATRIX_KERNELS and config[:2] == (type, "f32")
    ]
    return max(usable, key=lambda config: config[2] * config[3] * config[4], default=None)


def dialect_of(target: Target) -> str:
    """How a target's compiler spells matrices, see ``subgroup_matrices.wgsl.jinja``."""
    if "chromium-experimental-subgroup-matrix" in target.features:
        return "tint"
    return "naga" if "cooperative-matrix" in target.features else "lanes"


def units_tilings(
    problem: MatmulProblem, factor: str, config: MatrixConfig, target: Target
) -> Iterator[UnitsTiling]:
    """Tilings of a problem for a configuration that the target's limits allow, best first.

    ``factor``: as in `UnitsTiling`.
    """
    *_, m, n, k = config
    for (rows, columns), subgroups, least in _BY_SIZE:
        unit = Unit(m, n, k)
        size = rows, columns, _INNER
        tiling = UnitsTiling(unit, factor, target.subgroup_size, *size, *subgroups, buffers=1)
        enough = problem.workgroups(tiling) >= target.machine.scaled(least)
        if enough and units_fit(tiling, problem, target):
            yield tiling


def units_fit(tiling: UnitsTiling, problem: MatmulProblem, target: Target) -> bool:
    """Whether a tiling can compute a problem within the target's limits."""
    return (
        tiling.is_whole
        and not (problem.paired and tiling.units_n % 2)
        and tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(problem.axes, problem.paired) <= target.max_workgroup_nbytes
    )
