"""Work distribution of Fourier transforms, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...ir.access import step_of
from ...ir.buffers import Buffer
from ...ir.fourier import MOST_KEPT
from ...ir.nodes import Fourier
from ...ir.scalar import Index, loads_of
from ...ir.spaces import numbered
from ...symbolic.sizes import (
    ONE,
    Expr,
    as_expr,
    linearize,
    magnitude,
    power_of_two_at_least,
    typical,
)
from ...target import Target

# Pairs in workgroup memory before one is left out.
PADDING = 16
_PAIR_NBYTES = 8
# A row of one invocation per element of memory would leave a subgroup's lanes without work.
_SMALLEST_WORKGROUP = 32
# Neighbouring rows that share 32 bytes of memory, where elements of a row are apart.
_ROWS_OF_SECTOR = 4


@dataclass(frozen=True, slots=True)
class FourierTiling:
    """How a workgroup transforms rows.

    Attributes:
        threads: invocations that share a row.
        rows: rows of a workgroup.
        padded: whether one pair in memory is left out after `PADDING`, so that invocations whose
            elements are a power of two apart use different banks.
        stride: pairs between rows in workgroup memory; 0 when it is not used.
        load_rows_fast: neighbouring invocations load neighbouring rows, else neighbouring elements.
        store_rows_fast: the same of stores.
    """

    threads: int
    rows: int
    padded: bool
    stride: int
    load_rows_fast: bool
    store_rows_fast: bool

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup."""
        return self.threads * self.rows

    @property
    def nbytes(self) -> int:
        """Workgroup memory."""
        return self.rows * self.stride * _PAIR_NBYTES


def rows_are_neighbours(node: Fourier, buffers: Mapping[str, Buffer]) -> tuple[bool, bool]:
    """Whether loads, and stores, of neighbouring rows are closer than those of a row."""
    rows = [s for s in numbered("i", node.ranges) if s.extent is not ONE]
    if not rows:
        return False, False
    n = as_expr(node.length)
    j, k = (numbered(prefix, (n,))[0] for prefix in "jk")
    found = []
    for load in loads_of(node.real):
        if all(isinstance(entry, Index) for entry in load.index):
            buffer = buffers[load.buffer]
            exprs = [entry.expr for entry in load.index if isinstance(entry, Index)]
            address = linearize(exprs, buffer.strides)
            steps = step_of(address, j), step_of(address, rows[-1])
            if steps[0]:
                found.append((typical(buffer.numel), steps))
    along, across = max(found, default=(0, (1, 0)))[1]
    output = buffers[node.output]
    address = linearize(node.index, output.strides[: len(node.index)])
    stored = 0 < step_of(address, rows[-1]) < step_of(address, k)
    return 0 < across < along, stored


def choose_fourier_tiling(
    radices: Sequence[int],
    count: Expr,
    load_rows_fast: bool,
    store_rows_fast: bool,
    target: Target,
) -> FourierTiling | None:
    """The tiling for ``count`` rows; None where one row does not fit in workgroup memory."""
    n = prod(radices)
    if len(radices) == 1:
        store_rows_fast = load_rows_fast  # an invocation has whole rows
    rows_fast = load_rows_fast or store_rows_fast
    limit = target.workgroup_invocations
    least = _least_rows(n, limit, target) if rows_fast else 1
    number = magnitude(count)
    if number is not None:
        least = min(least, power_of_two_at_least(number))
    threads = n // max(radices)
    threads = -(-threads // -(-threads // (limit // least)))
    rows = limit // threads
    many = 2 * target.machine.multiprocessors
    if number is not None:
        rows = min(rows, power_of_two_at_least(number))
        while (
            rows >= 2 * least
            and rows * threads >= 2 * _SMALLEST_WORKGROUP
            and -(-number // rows) < many
        ):
            rows //= 2
    while rows > 0:
        for padded in (True, False):
            stride = _stride(n, padded, rows_fast) if radices[1:] else 0
            tiling = FourierTiling(threads, rows, padded, stride, load_rows_fast, store_rows_fast)
            if tiling.nbytes <= target.max_workgroup_nbytes:
                return tiling
        rows -= 1
    return None


def _least_rows(n: int, limit: int, target: Target) -> int:
    """Neighbouring rows to take together, where there is memory for them."""
    rows = _ROWS_OF_SECTOR
    while rows > 1 and (
        rows * n * _PAIR_NBYTES > target.max_workgroup_nbytes or n * rows > MOST_KEPT * limit
    ):
        rows //= 2
    return rows


def _stride(n: int, padded: bool, rows_fast: bool) -> int:
    """Odd where neighbouring invocations use the same element of different rows, if padded."""
    length = n + (n - 1) // PADDING if padded else n
    return length | 1 if padded and rows_fast else length
