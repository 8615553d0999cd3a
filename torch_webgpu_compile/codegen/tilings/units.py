"""How contractions are tiled for matrix units: the tilings to choose from, and the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...target import MatrixConfig, Target
from .matmul import MatmulProblem

_NBYTES = {"f16": 2, "f32": 4}

PADDING_NBYTES = 16
"""Between lines of a tile, which start in other banks then; all are aligned."""


def factor_nbytes(factor: str) -> int:
    """Bytes of an element of a tile of this WGSL type."""
    return _NBYTES[factor]


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
        factor: the WGSL type of what is multiplied, ``f16`` or ``f32``; sums are f32.
        lanes: invocations of a subgroup.
        rows, columns, inner: the workgroup's tile, elements.
        subgroups_m, subgroups_n: how many subgroups share its rows, and its columns.
        buffers: 2: the next tile is stored beside the one that is multiplied; 1: after it.
        drained: units of a row that a subgroup stores to workgroup memory at once. More of it is
            worse: with 28 KiB, a multiprocessor of an H100 takes only one workgroup at a time, with
            24 KiB two.
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
        return (self.inner if axis == "inner" else size) + PADDING_NBYTES // _NBYTES[self.factor]

    def numel(self, axis: str, size: int) -> int:
        """Elements of an operand's tile."""
        return self.line(axis, size) * (size if axis == "inner" else self.inner)

    @property
    def sums(self) -> int:
        """Results that are in workgroup memory at once."""
        return self.subgroups_m * self.subgroups_n * self.unit.m * self.unit.n * self.drained

    def workgroup_nbytes(self, axes: Sequence[str]) -> int:
        """Workgroup memory. ``axes``: along which the tiles of lhs and rhs are loaded."""
        tiles = self.numel(axes[0], self.rows) + self.numel(axes[1], self.columns)
        return self.buffers * tiles * _NBYTES[self.factor] + 4 * self.sums


# (rows, columns, subgroups along each) by falling size, with the workgroups of an H200 that make
# each worth while. On an H100, 512×2048×8192 in 256 of the large ones has 207 TFLOP/s, 192 of them
# for 1024×768×3072 140, and 512×8192×2048 in 256 of the small ones 114: in 128 of 64×128 it has 98.
_BY_SIZE = (((128, 128), (1, 4), 160), ((64, 64), (2, 2), 0))
_INNER = 32


def dialect_of(target: Target) -> str:
    """How a target's compiler spells matrices, see ``subgroup_matrices.wgsl.jinja``."""
    if "chromium-experimental-subgroup-matrix" in target.features:
        return "tint"
    return "naga" if "cooperative-matrix" in target.features else "lanes"


def units_tilings(
    problem: MatmulProblem, config: MatrixConfig, target: Target
) -> Iterator[UnitsTiling]:
    """Tilings of a problem for a configuration that the target's limits allow, best first."""
    factor, _, m, n, k = config
    for (rows, columns), subgroups, least in _BY_SIZE:
        unit = Unit(m, n, k)
        size = rows, columns, _INNER
        tiling = UnitsTiling(unit, factor, target.subgroup_size, *size, *subgroups, buffers=1)
        enough = problem.workgroups(tiling) >= target.machine.scaled(least)
        if enough and units_fit(tiling, problem, target):
            yield tiling


def units_fit(tiling: UnitsTiling, problem: MatmulProblem, target: Target) -> bool:
    """Whether a tiling can compute a problem within the target's limits."""
    products = 2 if problem.paired else 1
    return (
        tiling.is_whole
        and tiling.units_n % (products * tiling.drained) == 0
        and tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(problem.axes) <= target.max_workgroup_nbytes
    )
