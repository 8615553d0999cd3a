"""How contractions are tiled: the problem, the tilings to choose from, and the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Protocol

from ...ir.access import VECTOR
from ...ir.factors import BYTES
from ...symbolic.sizes import Expr, magnitude, power_of_two_at_least, upper_bound
from ...target import Target

_UNKNOWN = 512  # sizes that a call decides count as large


class MatmulTile(Protocol):
    """What a workgroup computes of a result, in whatever way."""

    @property
    def rows(self) -> int:
        """Its rows."""

    @property
    def columns(self) -> int:
        """Its columns, those of both where two products are a pair."""


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """What the best tiling of a contraction, or of several in one dispatch, depends on.

    Attributes:
        batch, inner: sizes; of those that a call decides about how large they are, or None where
            that is not known. Inner ones are in words, of bytes.
        shapes: rows and columns of each product, likewise; of few that a call decides, the most.
        paired: whether there are two products of the one shape, both computed by each invocation.
        itemsize: bytes of an element, or of a word of bytes, while it is multiplied.
        factor: what is multiplied before it is made the type of the sums: ``f16``, ``i8`` or
            ``u8``, of which words of four inner neighbours are multiplied; else "".
        step: what the inner size is a multiple of; None: of itself.
        exact: whether the call decides no size.
        smaller: `shapes`, with the smaller of the two powers of two in its class for each size that
            a call decides; they are filled less well.
        lhs, rhs: how the operands lie in memory: the axis along which their tiles are loaded, see
            `contraction.Operand`.
    """

    batch: int | None
    shapes: tuple[tuple[int | None, int | None], ...]
    inner: int | None
    itemsize: int
    lhs: str
    rhs: str
    paired: bool = False
    factor: str = ""
    step: int | None = None
    exact: bool = True
    smaller: tuple[tuple[int | None, int | None], ...] = ()

    @classmethod
    def of(
        cls,
        sizes: tuple[Expr, Expr],
        shapes: Sequence[tuple[Expr, Expr]],
        itemsize: int,
        axes: tuple[str, str],
        paired: bool,
        factor: str = "",
    ) -> MatmulProblem:
        """``sizes``: batch and inner; ``axes``: of lhs and rhs."""
        batch, inner = map(magnitude, sizes)
        known = tuple((_known(rows), _known(columns)) for rows, columns in shapes)
        exact = all(size.is_constant for size in chain(sizes, *shapes))
        step = sizes[1].divisor
        smaller = tuple((_smaller(rows), _smaller(columns)) for rows, columns in shapes)
        return cls(batch, known, inner, itemsize, *axes, paired, factor, step, exact, smaller)

    @property
    def axes(self) -> tuple[str, str]:
        """Along which the tiles of lhs and rhs are loaded."""
        return self.lhs, self.rhs

    @property
    def rows(self) -> int:
        """The most rows of a product; a number for those that a call decides."""
        return max(rows or _UNKNOWN for rows, _ in self.shapes)

    @property
    def columns(self) -> int:
        """The most columns of a product; a number for those that a call decides."""
        return max(columns or _UNKNOWN for _, columns in self.shapes)

    @property
    def key(self) -> str | None:
        """Names the problem in tables of measured tilings; None where a call decides sizes."""
        if not self.exact:
            return None
        times = "2*" if self.paired else ""
        shapes = "+".join(f"{rows}x{times}{columns}" for rows, columns in self.shapes)
        sizes = f"{self.batch}x{shapes}x{self.inner}"
        bits = 8 if self.factor in BYTES else self.itemsize * 8
        return f"{bits}-bit {sizes} {self.lhs} {self.rhs}"

    @property
    def is_known(self) -> bool:
        """Whether it is known how large all sizes are, about."""
        return None not in (self.batch, self.inner, *chain(*self.shapes))

    def divides_inner(self, count: int) -> bool:
        """Whether the inner size is a multiple of this."""
        step = self.inner if self.step is None else self.step
        return step is not None and step % count == 0

    def column_groups(self, size: int) -> int:
        """Groups of so many columns, of all products and the batch."""
        groups = sum(-(-(columns or _UNKNOWN) // size) for _, columns in self.shapes)
        return (self.batch or _UNKNOWN) * groups

    def workgroups(self, tiling: MatmulTile) -> int:
        """Tiles of the results."""
        width = self.columns_of(tiling)
        return (self.batch or _UNKNOWN) * sum(
            -(-(rows or _UNKNOWN) // tiling.rows) * -(-(columns or _UNKNOWN) // width)
            for rows, columns in self.shapes
        )

    def used_share(self, tiling: MatmulTiling) -> float:
        """The part of the tiles that the results fill, for each size that fills them least."""
        width = self.columns_of(tiling)
        results = tiles = 0
        for rows, columns in self.smaller or self.shapes:
            m, n = rows or _UNKNOWN, columns or _UNKNOWN
            results += m * n
            tiles += -(-m // tiling.rows) * -(-n // width)
        return results / (tiles * tiling.rows * width)

    def columns_of(self, tiling: MatmulTile) -> int:
        """Columns of a product that a workgroup computes: of a pair, half of the tile's each."""
        return tiling.columns // 2 if self.paired else tiling.columns

    def adapt(self, tiling: MatmulTiling) -> MatmulTiling:
        """The tiling, wide enough for an invocation to have four columns of each of a pair."""
        if not self.paired or tiling.thread_columns >= 8:
            return tiling
        return replace(tiling, columns=2 * tiling.columns, thread_columns=2 * tiling.thread_columns)


def _known(size: Expr) -> int | None:
    """Rows or columns: of a few, as many as there may be; more where there may be more."""
    most, known = upper_bound(size), magnitude(size)
    if most is not None and most <= _MOST_ROWS:
        return most
    return known if known is None or size.is_constant else max(known, _MOST_ROWS + 1)


def _smaller(size: Expr) -> int | None:
    """Rows or columns: of a class, the smaller power of two in it."""
    known = _known(size)
    return known if known is None or size.is_constant else known * 2 // 3


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """A tile of a contraction's result per workgroup, a register tile per invocation.

    Attributes:
        rows, columns, inner: the workgroup's tile, elements.
        thread_rows, thread_columns: the invocation's tile, elements (multiples of 4).
        slices: groups of invocations that compute the same tile from parts of the inner dimension
            (a power of two): parallelism for small results.
        double_buffer: load the next tile into registers and the other half of workgroup memory
            while computing on this one.
        unroll: steps of ``inner`` per loop iteration in the multiply loop; neither naga nor drivers
            unroll. swizzle: row tiles that consecutive workgroups share before moving to the next
            column tile.
        strips: columns of tiles, the last ones of each product, that are computed in `small` tiles
            instead, so that the last workgroups are short where their number fits a GPU badly.
            Sizes have to be known.
    """

    rows: int
    columns: int
    inner: int
    thread_rows: int
    thread_columns: int
    double_buffer: bool
    unroll: int
    slices: int = 1
    swizzle: int = 8
    strips: int = 0

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup: those of all slices."""
        tile = (self.rows // self.thread_rows) * (self.columns // self.thread_columns)
        return tile * self.slices

    @property
    def is_divisible(self) -> bool:
        """Whether `small` tiles fit into the tiles, with as many slices as kernels can have."""
        whole = self.rows % 32 == self.columns % 32 == 0
        return whole and self.workgroup in (32, 64, 128, 256, 512)

    @property
    def small(self) -> MatmulTiling:
        """Tiles for the rest of a product, with the same workgroup."""
        return replace(
            self,
            rows=32,
            columns=32,
            thread_rows=8,
            thread_columns=4,
            slices=self.workgroup // 32,
            strips=0,
        )

    @property
    def depth(self) -> int:
        """A step along the inner dimension, of all slices; the longer one where there are two."""
        own = self.inner * self.slices
        return max(own, self.small.depth) if self.strips else own

    @staticmethod
    def padding(axis: str) -> int:
        """vec4s between lines of a tile that is loaded along this axis."""
        return 1 if axis == "scalar_inner" else 0

    def workgroup_nbytes(self, itemsize: int, axes: Sequence[str]) -> int:
        """Workgroup memory of both operands' tiles, which the sums of slices share.

        ``axes``: along which the tiles are loaded, see `contraction.Operand`.
        """
        buffers = 2 if self.double_buffer else 1
        lines = self.rows + self.columns + VECTOR * sum(map(self.padding, axes))
        tiles = self.slices * buffers * self.inner * lines
        own = itemsize * max(tiles, self.slices // 2 * self.rows * self.columns)
        return max(own, self.small.workgroup_nbytes(itemsize, axes)) if self.strips else own


@dataclass(frozen=True, slots=True)
class FewRowsTiling:
    """All rows of a product per invocation, and a few of its columns: see `few_rows_tiling`.

    Attributes:
        rows: of the product.
        columns: that an invocation computes (a multiple of 4).
        threads: invocations that share them, each with a part of the inner dimension (a power of
            two).
        groups: runs of so many invocations in a workgroup.
        run: fours of elements along the inner dimension that an invocation takes at once.
        shuffled: neighbours of those, in one subgroup, that add their sums by shuffles, of all rows
            at once (a power of two, no fewer than rows); 1: none do.
        at_once: rows whose sums are exchanged together through workgroup memory, as many as there
            is room for.
    """

    rows: int
    columns: int
    threads: int
    groups: int
    run: int
    shuffled: int
    at_once: int

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup."""
        return self.threads * self.groups

    @property
    def is_shuffled(self) -> bool:
        """Whether shuffles alone make whole sums."""
        return 1 < self.shuffled == self.threads

    @property
    def padded_rows(self) -> int:
        """Rows, up to a power of two."""
        return power_of_two_at_least(self.rows)

    def terms(self, products: int) -> int:
        """Elements of workgroup memory, where so many products are computed together."""
        if self.is_shuffled:
            return 0
        return self.at_once * products * self.columns * self.workgroup // self.shuffled


# Rows, of all products that are computed together, whose sums an invocation has registers for; and
# how many sums that may be.
_MOST_ROWS, _MOST_SUMS = 16, 128
_FEW_ROWS_WORKGROUP, _FEW_ROWS_COLUMNS, _FEW_ROWS_THREADS = 128, (8, 4), 32
_FEW_ROWS_INVOCATIONS = 1 << 15  # that fill an H200, at this many registers for each
_FEWEST_STEPS = 4  # along the inner dimension, that are worth adding the sums of more columns


def has_few_rows(problem: MatmulProblem) -> bool:
    """Whether a problem is better computed without tiles: see `few_rows_tiling`."""
    rows = problem.rows * (2 if problem.paired else 1)
    is_along = problem.lhs == problem.rhs == "inner" and problem.inner is not None
    return is_along and problem.itemsize == 4 and rows <= _MOST_ROWS


def few_rows_tiling(problem: MatmulProblem, target: Target, run: int) -> FewRowsTiling:
    """How a product of few rows is computed without tiles.

    Such a product takes little longer than reading the matrix does: each element is loaded once,
    straight into registers. 8 × 16384 × 2048 in bf16 takes an H100 60 µs with 16 invocations for
    four columns, loads of 8 bytes and sums through workgroup memory; 51 with 32 of them; 45 with
    loads of 16 bytes, too; 25 with eight columns, for which rows are loaded half as often; reading
    the matrix alone 26. 64 invocations and loops that are unrolled are slower. Where there are few
    columns, more invocations share them: 8 × 2048 × 8192 takes 54 µs with 32 for four columns, 34
    with 64, 24 with 128 for eight; but 8 × 2048 × 2048 14 with 64 for four, 15 with 128 for eight.

    Args:
        run: fours of elements that one access holds of the matrix.
    """
    assert problem.inner is not None
    rows, products = problem.rows, 2 if problem.paired else 1
    workgroup = min(_FEW_ROWS_WORKGROUP, target.max_workgroup_invocations)
    run = run if problem.divides_inner(VECTOR * run) else 1
    shares = -(-problem.inner // (VECTOR * run))
    for columns in _FEW_ROWS_COLUMNS:
        wanted = target.machine.scaled(_FEW_ROWS_INVOCATIONS) // problem.column_groups(columns)
        wanted = max(_FEW_ROWS_THREADS, power_of_two_at_least(wanted))
        threads = min(wanted, power_of_two_at_least(shares), workgroup)
        if rows * products * columns <= _MOST_SUMS and shares >= _FEWEST_STEPS * threads:
            break
    shuffled = min(threads, target.subgroup_size)
    if shuffled < rows:
        shuffled = 1
    row_nbytes = products * columns * workgroup // shuffled * problem.itemsize
    at_once = min(rows, target.max_workgroup_nbytes // row_nbytes)
    groups = workgroup // threads
    return FewRowsTiling(rows, columns, threads, groups, run, shuffled, at_once)


# By falling size, with the workgroups of an H200 that make each worth while: two per multiprocessor
# and more. There, for the 34 products of GPT-2, BERT, ViT and ResNet-50, this choice takes 1.04
# times as long as the best of `_MEASURED` (geometric mean; the second tiling for all 1.06).
_BY_SIZE = (
    (MatmulTiling(128, 64, 8, 8, 8, True, 8), 350),
    (MatmulTiling(64, 64, 8, 8, 8, True, 8, slices=2), 130),
    (MatmulTiling(32, 32, 8, 8, 4, True, 8, slices=4), 0),
)
# Of the first of them, where the columns are windows of images, which are loaded element by element
# for every tile of rows: on an H100 a 3×3 convolution of 128 channels of 16 × 28² takes 196 µs in
# its 208 workgroups, 292 in 416 of the next one; but its weight's gradient, whose rows are loaded
# as they lie in memory, takes as long in either.
_OF_WINDOWS = 190
# A tiling is not used where the next one's tiles are so much fuller: 64 channels of 16 × 56² take
# 199 µs in tiles of 128 rows, 119 in tiles of 64.
_FULL_ENOUGH = 0.7
# Before those, where all sizes are known: with eight full turns of two workgroups for each
# multiprocessor, whose last turn is a small part of all. On an H100, 50257×768×1024 takes 1.68 ms
# in it and 1.86 in the next one, 1024×50257×768 1.89 and 1.92; 1024×768×50257 in four parts, which
# are 192 workgroups, 2.70 and 2.01.
_LARGEST, _LARGEST_LEAST = MatmulTiling(128, 128, 8, 8, 8, True, 8), 2112
_SMALLEST = MatmulTiling(32, 32, 8, 4, 4, True, 8)
_FEW = 16  # rows or columns
_FEW_ROWS = (
    MatmulTiling(16, 32, 16, 4, 4, True, 8, slices=8),
    MatmulTiling(16, 32, 8, 4, 4, True, 8, slices=4),
    MatmulTiling(16, 64, 16, 4, 4, True, 8),
)

# A CPU gains nothing from slices nor from loads ahead of time, and its driver compiles long kernels
# at their first dispatch: with tiles twice as deep, in two buffers, and eight steps at once, BERT's
# four products take 5.6 s there instead of 1.8 on two cores, and a fifth longer in each call.
_SOFTWARE = MatmulTiling(32, 32, 8, 4, 4, False, 4)
_SOFTWARE_FEW_ROWS = MatmulTiling(16, 64, 8, 4, 4, False, 4)

# Where somebody waits for the compiler, by falling size, with the workgroups of an H200 that make
# each worth while: of the second, five for each core of a laptop's GPU. On SwiftShader, with the
# checks of browsers, a kernel's time is that of its registers: MiniLM's take 10.9 s in the tilings
# by size, 5.1 with one buffer and no slices, 3.6 in the second of these, 2.6 in the third; where
# its pairs are in the third as well, the first result comes no earlier, and a call takes longer.
_BRIEF_BY_SIZE = (
    (MatmulTiling(64, 64, 8, 8, 8, False, 8), 1000),
    (MatmulTiling(32, 64, 8, 4, 8, False, 8), 660),
    (MatmulTiling(32, 32, 8, 4, 4, False, 8), 0),
)
_BRIEF_FEW_ROWS = MatmulTiling(16, 64, 8, 4, 4, False, 8)

# What is measured under ``mode="max-autotune"``: rows, columns, inner, register tile, slices.
_MEASURED = (
    *(tiling for tiling, _ in _BY_SIZE),
    _LARGEST,
    MatmulTiling(64, 128, 8, 8, 8, True, 8),
    MatmulTiling(64, 32, 8, 8, 4, True, 8, slices=2),
    MatmulTiling(32, 32, 16, 4, 4, True, 8),
    MatmulTiling(64, 64, 16, 4, 4, True, 8),
    MatmulTiling(128, 128, 16, 8, 8, False, 8),
    MatmulTiling(128, 64, 8, 8, 8, True, 8, slices=2),
    MatmulTiling(64, 64, 8, 8, 8, True, 8),
    MatmulTiling(64, 64, 8, 8, 8, True, 8, slices=4),
    MatmulTiling(64, 64, 16, 8, 8, False, 8, slices=4),
    MatmulTiling(64, 64, 8, 8, 4, True, 8, slices=2),
    MatmulTiling(64, 32, 8, 8, 4, True, 8, slices=4),
    MatmulTiling(32, 64, 8, 4, 8, True, 8, slices=4),
    MatmulTiling(32, 32, 8, 4, 4, True, 8, slices=4),
    MatmulTiling(32, 32, 8, 8, 8, True, 8, slices=8),
    # Between powers of two: for results with a few tiles more than a GPU runs at once.
    MatmulTiling(64, 96, 8, 8, 8, True, 8, slices=4),
    MatmulTiling(48, 64, 8, 8, 8, True, 8, slices=2),
    MatmulTiling(48, 64, 8, 8, 8, True, 8, slices=4),
    MatmulTiling(96, 64, 8, 12, 8, True, 8, slices=2),
    MatmulTiling(64, 96, 8, 8, 12, True, 8, slices=2),
    MatmulTiling(64, 96, 8, 8, 4, True, 8, slices=2),
)
# Those that large products are computed in, of which a few tiles may be divided.
_DIVIDED = frozenset(
    {
        MatmulTiling(64, 64, 8, 8, 8, True, 8, slices=2),
        MatmulTiling(64, 128, 8, 8, 8, True, 8),
        MatmulTiling(128, 64, 8, 8, 8, True, 8),
    }
)
_MEASURED_FEW_ROWS = (
    *_FEW_ROWS,
    MatmulTiling(16, 64, 8, 4, 4, True, 8, slices=4),
    MatmulTiling(16, 128, 8, 4, 8, True, 8, slices=4),
    MatmulTiling(8, 64, 16, 4, 4, True, 8, slices=8),
    MatmulTiling(4, 64, 16, 4, 4, True, 8, slices=16),
)


def fits(tiling: MatmulTiling, itemsize: int, axes: Sequence[str], target: Target) -> bool:
    """Whether the adapter's limits allow it, for operands that are loaded along these axes."""
    return (
        tiling.workgroup <= target.max_workgroup_invocations
        and tiling.workgroup_nbytes(itemsize, axes) <= target.max_workgroup_nbytes
    )


def matmul_candidates(problem: MatmulProblem, target: Target) -> Iterator[MatmulTiling]:
    """The tilings worth measuring for a problem."""
    found = _where_few(problem, _MEASURED_FEW_ROWS) or _MEASURED
    for tiling in dict.fromkeys(map(problem.adapt, found)):
        if fits(tiling, problem.itemsize, problem.axes, target):
            yield tiling
            if tiling in _DIVIDED and not problem.paired:
                yield from _with_strips(tiling, problem, target)


@cache
def measurable_tilings() -> frozenset[MatmulTiling]:
    """Every tiling that `matmul_candidates` may give for some problem, without its strips."""
    found = {*_MEASURED, *_MEASURED_FEW_ROWS, *map(_transposed, _MEASURED_FEW_ROWS)}
    pair = MatmulProblem(1, ((1, 1),), 1, 4, "", "", paired=True)
    return frozenset(found | set(map(pair.adapt, found)))


def _with_strips(
    tiling: MatmulTiling, problem: MatmulProblem, target: Target
) -> Iterator[MatmulTiling]:
    """With a few of the last columns of tiles in small ones, up to half of them."""
    columns = -(-problem.columns // tiling.columns)
    for strips in sorted({round(columns * part / 12) for part in (1, 1.5, 2, 3, 4, 6)} - {0}):
        divided = replace(tiling, strips=strips)
        if fits(divided, problem.itemsize, problem.axes, target):
            yield divided


def _transposed(tiling: MatmulTiling) -> MatmulTiling:
    return replace(
        tiling,
        rows=tiling.columns,
        columns=tiling.rows,
        thread_rows=tiling.thread_columns,
        thread_columns=tiling.thread_rows,
    )


def _where_few(problem: MatmulProblem, tilings: Sequence[MatmulTiling]) -> Sequence[MatmulTiling]:
    """Tilings for few rows, for few columns the same transposed; none where both are many."""
    if problem.rows <= _FEW:
        return tilings
    return [_transposed(tiling) for tiling in tilings] if problem.columns <= _FEW else ()


def choose_matmul_tiling(problem: MatmulProblem, target: Target) -> MatmulTiling:
    """The tiling for a problem that nobody measured."""
    if target.software:
        found = _in_software(problem)
    elif target.waits_for_compiler:
        found = _in_brief(problem, target)
    else:
        found = _in_order(problem, target)
    for tiling in map(problem.adapt, found):
        if problem.itemsize == 8:  # twice the workgroup memory: one buffer instead of two
            tiling = replace(tiling, double_buffer=False)
        if fits(tiling, problem.itemsize, problem.axes, target):
            return tiling
    return problem.adapt(replace(_SMALLEST, double_buffer=False))


def _in_software(problem: MatmulProblem) -> Iterator[MatmulTiling]:
    yield from _where_few(problem, [_SOFTWARE_FEW_ROWS])
    yield _SOFTWARE


def _in_brief(problem: MatmulProblem, target: Target) -> Iterator[MatmulTiling]:
    yield from _where_few(problem, [_BRIEF_FEW_ROWS])
    for tiling, least in _BRIEF_BY_SIZE:
        if problem.workgroups(problem.adapt(tiling)) >= target.machine.scaled(least):
            yield tiling


def _in_order(problem: MatmulProblem, target: Target) -> Iterator[MatmulTiling]:
    """Best first, whether they fit the adapter or not."""
    few = _where_few(problem, _FEW_ROWS)
    yield from few
    if not few:
        if _is_large(problem, target):
            yield _LARGEST
        yield from _by_size(problem, target)
    yield _SMALLEST


def _by_size(problem: MatmulProblem, target: Target) -> Iterator[MatmulTiling]:
    largest = _BY_SIZE[0][0]
    shares = [problem.used_share(problem.adapt(tiling)) for tiling, _ in _BY_SIZE]
    for (tiling, least), share, next_share in zip(
        _BY_SIZE, shares, (*shares[1:], 0.0), strict=True
    ):
        if tiling is largest and problem.rhs == "scalar_inner" and problem.lhs != "outer":
            least = _OF_WINDOWS
        is_full = share >= _FULL_ENOUGH * next_share
        if is_full and problem.workgroups(problem.adapt(tiling)) >= target.machine.scaled(least):
            yield tiling


def _is_large(problem: MatmulProblem, target: Target) -> bool:
    """Whether the largest tiles are many, and are used nearly as well as the next ones."""
    share, second, third = (
        problem.used_share(tiling) for tiling in (_LARGEST, *(tiling for tiling, _ in _BY_SIZE[:2]))
    )
    many = problem.workgroups(_LARGEST) >= target.machine.scaled(_LARGEST_LEAST)
    is_full = second <= 1.02 * share and _FULL_ENOUGH * third <= share
    return problem.is_known and many and is_full
