"""How contractions are tiled for matrix units: the tilings to choose from, and the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from ...ir.access import VECTOR
from ...target import MatrixConfig, Target
from .matmul import MatmulProblem

_NBYTES = {"f16": 2, "bf16": 2, "f32": 4, "i8": 1, "u8": 1}
_SUMS = {"f16": "f32", "bf16": "f32", "f32": "f32", "i8": "i32", "u8": "u32"}

FACTORS = frozenset(_NBYTES)
"""What `InUnits.factor` may be."""
PADDING_NBYTES = 16
"""Between lines of a tile, which start in other banks then; all are aligned."""

IN_UNITS = " in units"
"""How keys of tables of tilings end that have a `UnitsTiling`."""
MOST_MISSED = 64
"""Elements of bfloat16 outside of f16's range that a tile's sums are corrected for.

A tile with more is computed again. Of normally distributed numbers, every 10⁸th is one.
"""
BFLOAT16_NBYTES = 8 * MOST_MISSED + 80
"""Workgroup memory of what is known of elements' exponents."""
BFLOAT16_PASSES = 9 * 9 + 1
"""The most passes over its operands that a tile of bfloat16 takes, after the first one.

The 254 exponents of each operand are in ranges of 30, one of each operand in a pass; another one is
for infinities and NaN.
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """The size of one product of matrix units: m × k elements by k × n."""

    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class InUnits:
    """The common part of tilings for matrix units.

    Attributes:
        unit: of the matrix units.
        factor: what is multiplied: ``f16``, ``f32``, ``i8``, ``u8``, or ``bf16``, by units of f16,
            see ``bfloat16_units.wgsl.jinja``.
        lanes: invocations of a subgroup.
    """

    unit: Unit
    factor: str
    lanes: int

    @property
    def type(self) -> str:
        """The type of the factors that the units multiply."""
        return "f16" if self.factor == "bf16" else self.factor

    @property
    def config(self) -> MatrixConfig:
        """The configuration of the matrix units."""
        return self.type, self.sum_type, self.unit.m, self.unit.n, self.unit.k

    @property
    def packing(self) -> int:
        """Elements of the inner dimension that count as one, as they share a word."""
        return 4 if _NBYTES[self.factor] == 1 else 1

    @property
    def stored(self) -> str:
        """The WGSL type of the tiles in workgroup memory; of bytes, that of their words."""
        return _SUMS[self.factor] if self.packing > 1 else self.type

    @property
    def sum_type(self) -> str:
        """The WGSL type of a sum."""
        return _SUMS[self.factor]

    @property
    def unit_inner(self) -> int:
        """Elements of the inner dimension in a unit."""
        return self.unit.k // self.packing

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the tiles in workgroup memory."""
        return _NBYTES[self.factor] * self.packing


@dataclass(frozen=True, slots=True)
class UnitsTiling(InUnits):
    """A tile of a contraction's result per workgroup, of which each subgroup computes a part.

    Attributes:
        rows, columns, inner: the workgroup's tile, elements; along the inner dimension, of bytes,
            words of four.
        subgroups_m, subgroups_n: how many subgroups share its rows, and its columns.
        drained: units of a row that a subgroup stores to workgroup memory at once. More of it is
            worse: with 28 KiB, a multiprocessor of an H100 takes only one workgroup at a time, with
            24 KiB two.
        swizzle: row tiles that consecutive workgroups share before the next column tile.
    """

    rows: int
    columns: int
    inner: int
    subgroups_m: int
    subgroups_n: int
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
        return whole_m and whole_n and self.inner % self.unit_inner == 0

    def is_along_inner(self, axis: str) -> bool:
        """Whether lines of an operand's tile, loaded along ``axis``, go along the inner dimension.

        They go along what neighbours are loaded along; but words have inner neighbours.
        """
        return axis == "inner" or self.packing > 1

    def line(self, axis: str, size: int) -> int:
        """Elements, or words of bytes, from a line of an operand's tile to the next one.

        ``size``: elements of the dimension that is not the inner one.
        """
        length = self.inner if self.is_along_inner(axis) else size
        return length + PADDING_NBYTES // self.itemsize

    def numel(self, axis: str, size: int) -> int:
        """Elements, or words of bytes, of an operand's tile."""
        return self.line(axis, size) * (size if self.is_along_inner(axis) else self.inner)

    @property
    def sums(self) -> int:
        """Results that are in workgroup memory at once."""
        return self.subgroups_m * self.subgroups_n * self.unit.m * self.unit.n * self.drained

    def slots(self, paired: bool) -> int:
        """Fours of results that an invocation takes from workgroup memory in the end."""
        products = 2 if paired else 1
        quads = -(-self.unit.m * self.unit.n * self.drained // (VECTOR * self.lanes))
        return products * self.units_m * (self.units_n // (products * self.drained)) * quads

    def workgroup_nbytes(self, axes: Sequence[str]) -> int:
        """Workgroup memory. ``axes``: along which the tiles of lhs and rhs are loaded."""
        tiles = self.numel(axes[0], self.rows) + self.numel(axes[1], self.columns)
        own = BFLOAT16_NBYTES if self.factor == "bf16" else 0
        return tiles * self.itemsize + 4 * self.sums + own


# (rows, columns, subgroups along each) by falling size, with the workgroups of an H200 that make
# each worth while. On an H100, 512×2048×8192 in 256 of the large ones has 207 TFLOP/s, 192 of them
# for 1024×768×3072 140, and 512×8192×2048 in 256 of the small ones 114: in 128 of 64×128 it has 98.
# On an H200, 2048×2048×2048 takes 98 µs in 256 of the large ones and 145 in the small ones. Sizes
# that a call decides, from 768 to 3071, count as 1536: that is 144 of the large ones, as good then.
_BY_SIZE = (((128, 128), (1, 4), 130), ((64, 64), (2, 2), 0))
# Of bfloat16, whose elements cost arithmetic each time that they are loaded, fewer and larger tiles
# of more subgroups: on an H200, 512×2048×8192 has 89 TFLOP/s in the large ones and 48 in those of
# f16.
_BFLOAT16_BY_SIZE = (((128, 256), (2, 4), 96), ((64, 128), (2, 4), 0))
# With shifts, see `Contraction`, f16 is made of each element, which costs less but something: on an
# H100, 512×8192×2048 has 131 TFLOP/s in the large ones and 107 in the next.
_SHIFTED_BY_SIZE = (((128, 256), (2, 4), 96), *_BY_SIZE)
# Where a few tiles are computed again, one of them is waited for: on an H100, those that one column
# of 512×2048×16384 is in took 110 µs in large ones. One weight of 33 million elements in ten has
# such a column, if they are normally distributed.
_RARE_BY_SIZE = (((64, 64), (2, 2), 0),)
_INNER, _INNER_WORDS = 32, 16


def dialect_of(target: Target) -> str:
    """How a target's compiler spells matrices, see ``subgroup_matrices.wgsl.jinja``."""
    if "chromium-experimental-subgroup-matrix" in target.features:
        return "tint"
    return "naga" if "cooperative-matrix" in target.features else "lanes"


def units_tilings(
    problem: MatmulProblem,
    factor: str,
    config: MatrixConfig,
    target: Target,
    *,
    has_shifts: bool = False,
) -> Iterator[UnitsTiling]:
    """Tilings of a problem for a configuration that the target's limits allow, best first.

    Args:
        factor: as in `UnitsTiling`.
        has_shifts: with them, most tiles of bfloat16 have nothing to compute.
    """
    *_, m, n, k = config
    inners: tuple[int, ...] = (_inner(factor),)
    by_size: tuple[tuple[tuple[int, int], tuple[int, int], int], ...]
    if factor == "bf16" and has_shifts:
        by_size, inners = _RARE_BY_SIZE, (2 * inners[0], inners[0])
    elif factor == "bf16":
        by_size = _BFLOAT16_BY_SIZE
    else:
        by_size = _SHIFTED_BY_SIZE if has_shifts else _BY_SIZE
    for ((rows, columns), subgroups, least), inner in product(by_size, inners):
        unit = Unit(m, n, k)
        size = rows, columns, inner
        tiling = UnitsTiling(unit, factor, target.subgroup_size, *size, *subgroups)
        enough = problem.workgroups(tiling) >= target.machine.scaled(least)
        if enough and units_fit(tiling, problem, target):
            yield tiling


# What is worth measuring: rows, columns, and subgroups along each.
_MEASURED = (
    (128, 128, 1, 4),
    (128, 128, 2, 2),
    (128, 128, 4, 1),
    (128, 256, 2, 4),
    (256, 128, 4, 2),
    (64, 128, 1, 4),
    (128, 64, 4, 1),
    (64, 64, 2, 2),
    (64, 64, 1, 4),
    (64, 64, 1, 2),
    (32, 64, 1, 2),
    (32, 32, 1, 1),
)


def units_candidates(unit: Unit, factor: str, lanes: int) -> Iterator[UnitsTiling]:
    """The tilings worth measuring."""
    inner = _inner(factor)
    for size, (rows, columns, *subgroups) in product((inner, 2 * inner), _MEASURED):
        tiling = UnitsTiling(unit, factor, lanes, rows, columns, size, *subgroups)
        if tiling.is_whole:
            yield tiling


def _inner(factor: str) -> int:
    return _INNER_WORDS if _NBYTES[factor] == 1 else _INNER


def units_fit(tiling: UnitsTiling, problem: MatmulProblem, target: Target) -> bool:
    """Whether a tiling can compute a problem within the target's limits."""
    products = 2 if problem.paired else 1
    return (
        tiling.is_whole
        and tiling.units_n % (products * tiling.drained) == 0
        and tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(problem.axes) <= target.max_workgroup_nbytes
    )


def units_key(problem: MatmulProblem, tiling: UnitsTiling) -> str | None:
    """Names a problem that matrix units compute in tables of tilings; see `MatmulProblem.key`."""
    return problem.key and f"{problem.key} {tiling.factor}{IN_UNITS}"
