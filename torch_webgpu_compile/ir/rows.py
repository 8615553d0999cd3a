"""Strategies of row groups' kernels by shape, and the workgroup memory they take.

The scheduler asks it which row groups fit in one kernel together; code generation prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from .. import dtypes
from ..symbolic.sizes import (
    Expr,
    magnitude,
    power_of_two_at_least,
    product,
    symbols_of,
    upper_bound,
)
from ..target import Machine, Target
from .access import (
    VECTOR,
    elements_per_access,
    is_multiple_of,
    neighbours_in_rows,
    reads_across,
    workgroup_type,
)
from .buffers import Buffer
from .graph import Member, RowGroup
from .packed_rows import PackedRows, choose_packed_rows
from .packed_rows import workgroup as packed_workgroup
from .scalar import Index, Load, Op, Scalar, children, loads_of, rewrite
from .spaces import numbered
from .workgroup_memory import WorkgroupArray, shared_arrays


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
        run: shares side by side, so that together they load as much as one access moves of a dtype
            that is packed in words. Divides the row, ``unroll`` and ``chunks``.
    """

    threads: int
    rows: int
    elements_fast: bool
    lanes: int
    chunks: int | None
    unroll: int = 4
    run: int = 1

    @property
    def workgroup(self) -> int:
        """Invocations of a workgroup."""
        return self.threads * self.rows


@dataclass(frozen=True, slots=True)
class ShiftedSum:
    """A member that is Σ exp(v − shift), where ``largest`` names the member that is max v.

    ``shift`` has one value per row and is known once the maximum is.
    """

    largest: str
    shift: Scalar


@dataclass(frozen=True, slots=True)
class RowStrategy:
    """How a kernel computes a row group.

    Attributes:
        varying: members with one value per element rather than per row.
        sums: members that are computed in the pass of a maximum.
        depth: passes over the row that must be complete before each member's value is known.
        passes: over the row.
        subgroup: invocations that exchange accumulators by shuffles; 0 where that is not certain to
            work. It needs one known subgroup size, and rows that are runs of invocations. 64-bit
            and bool values are not shuffled everywhere.
        exchanged: (WGSL type, bytes) of each variable that invocations exchange, by passes.
        packed: how products with packed weights are computed by integers; None for others.
    """

    tiling: RowTiling
    varying: frozenset[str]
    sums: Mapping[str, ShiftedSum]
    depth: Mapping[str, int]
    passes: int
    subgroup: int
    exchanged: tuple[tuple[str, int], ...]
    packed: PackedRows | None = None

    def arrays(self, workgroup: int) -> tuple[WorkgroupArray, ...]:
        """The memory of a workgroup of so many invocations: of `exchanges`, then of `packed`."""
        packed = () if self.packed is None else self.packed.arrays().values()
        return (*self.exchanges(workgroup), *packed)

    def exchanges(self, workgroup: int) -> tuple[WorkgroupArray, ...]:
        """One array for each of `exchanged`, where shuffles do not suffice."""
        threads, subgroup = self.tiling.threads, self.subgroup or 1
        if threads <= subgroup:
            return ()
        length = workgroup // threads * threads // subgroup
        return tuple(WorkgroupArray(kind, length, size) for kind, size in self.exchanged)


def choose_row_strategy(
    group: RowGroup, buffers: Mapping[str, Buffer], target: Target
) -> RowStrategy:
    """The strategy for a row group; ``buffers`` are the graph's, by name."""
    members = group.members
    computed = {m.output for m in members}
    varying = _varying_members(group)
    depth = _passes_needed(group, {})
    passes = _passes(members, depth)
    final_pass = any(m.store and m.output in varying for m in members)
    if passes == 1 and not final_pass:
        packed = choose_packed_rows(group, buffers, target)
        if packed is not None:
            return _packed_strategy(packed, varying, depth, target)
    bodies = [m.body for m in members]
    given = {name: buffer for name, buffer in buffers.items() if name not in computed}
    elements = numbered("r", group.elements)
    vector, run = VECTOR, 1
    if any(body.dtype is dtypes.float64 for body in bodies):
        vector = 1
    elif passes == 1 and not final_pass:
        # Of bf16, half as many bytes in each access are as fast (33.6 MB in 16.7 µs and 16.9 on an
        # H100).
        run = max(1, elements_per_access(bodies, given, elements, 16) // VECTOR)
    tiling = choose_row_tiling(
        product(group.rows),
        product(group.elements),
        neighbours_in_rows(bodies, given, numbered("i", group.rows), elements),
        target,
        passes > 1 or final_pass,
        vector,
        run,
    )
    if tiling.run > 1 and reads_across(bodies, given, numbered("i", group.rows), elements):
        # Invocations side by side take a few rows, each some accesses: of scales by group and row,
        # one access then serves several of them.
        tiling = replace(tiling, elements_fast=False)
    sums: dict[str, ShiftedSum] = {}
    if tiling.chunks is None:  # a row that is not kept is read again in every pass
        sums = _shifted_sums(group, varying, row_test(group, varying))
        depth = _passes_needed(group, sums)
        passes = _passes(members, depth)
        if passes == 1 and not final_pass:
            # More invocations than keep the row's loads in flight gain nothing (50257 elements on
            # an H200: 0.42 ms with 512, 0.44 with 1024); of a row that is read again more fit the
            # cache.
            threads = min(tiling.threads, 2 * target.machine.workgroup_invocations)
            tiling = replace(tiling, threads=threads)
    types = {m.body.dtype.compute for m in members if m.reduction}
    shuffled = tiling.elements_fast and types <= {"f32", "i32", "u32"}
    return RowStrategy(
        tiling,
        varying,
        sums,
        depth,
        passes,
        target.subgroup_size if shuffled else 0,
        tuple(_exchanged(members, depth, sums, target)),
    )


def _packed_strategy(
    packed: PackedRows, varying: frozenset[str], depth: Mapping[str, int], target: Target
) -> RowStrategy:
    lanes = packed.lanes
    tiling = RowTiling(lanes, packed_workgroup(target) // lanes, True, 1, None, 1)
    count = len(packed.found.sums) * packed.rows_each + len(packed.found.statistics)
    exchanged = (workgroup_type(dtypes.float32),) * count
    return RowStrategy(tiling, varying, {}, depth, 1, target.subgroup_size, exchanged, packed)


def _passes(members: Sequence[Member], depth: Mapping[str, int]) -> int:
    return max(depth[m.output] for m in members if m.reduction)


def _exchanged(
    members: Sequence[Member],
    depth: Mapping[str, int],
    sums: Mapping[str, ShiftedSum],
    target: Target,
) -> list[tuple[str, int]]:
    largest = {own.largest for own in sums.values()}
    reductions = [m for m in members if m.reduction and m.output not in sums]
    found = []
    for m in sorted(reductions, key=lambda m: depth[m.output]):
        own = workgroup_type(target.in_wgsl(m.body.dtype))
        found.append(own)
        if m.output in largest:
            found.append(own)  # the sum
        elif m.reduction in ("argmin", "argmax"):
            found.append(workgroup_type(dtypes.int32))
    return found


def row_test(group: RowGroup, varying: frozenset[str]) -> Callable[[Scalar], bool]:
    """Tells which scalars have one value per row; ``varying``: see `RowStrategy`."""
    elements = numbered("r", group.elements)

    @cache
    def belongs_to_row(node: Scalar) -> bool:
        if isinstance(node, Index):
            return symbols_of(node.expr).isdisjoint(elements)
        if isinstance(node, Load) and node.buffer in varying:
            return False
        return all(belongs_to_row(child) for child in children(node))

    return belongs_to_row


# -- side by side ----------------------------------------------------------------------------------


def joint_workgroup(strategies: Sequence[RowStrategy], target: Target) -> int:
    """Invocations of the workgroups in which row groups are computed side by side.

    Without rows any size will do; with them, larger ones would repeat rows.
    """
    own = [strategy.tiling.workgroup for strategy in strategies]
    return max(own, default=target.workgroup_invocations)


def joint_nbytes(strategies: Sequence[RowStrategy], target: Target) -> int:
    """Workgroup memory of row groups that are computed side by side."""
    workgroup = joint_workgroup(strategies, target)
    arrays = shared_arrays(strategy.arrays(workgroup) for strategy in strategies)
    return sum(array.nbytes for array in arrays.values())


# -- members ---------------------------------------------------------------------------------------


def _varying_members(group: RowGroup) -> frozenset[str]:
    """Members with one value per element rather than per row."""
    elements = set(numbered("r", group.elements))
    return frozenset(
        m.output
        for m in group.members
        if m.reduction is None and any(symbols_of(i) & elements for i in m.index)
    )


def _passes_needed(group: RowGroup, sums: Mapping[str, ShiftedSum]) -> dict[str, int]:
    """Passes over the row that must be complete before a member's value is known.

    ``sums`` are accumulated in the pass of their maximum, and complete when their shift is known.
    """
    depth: dict[str, int] = {}
    for m in group.members:
        own = sums.get(m.output)
        loads = loads_of(m.body if own is None else own.shift)
        needed = max((depth[o.buffer] for o in loads if o.buffer in depth), default=0)
        if own is not None:
            depth[m.output] = max(needed, depth[own.largest])
        else:
            depth[m.output] = needed + (1 if m.reduction else 0)
    return depth


def _shifted_sums(
    group: RowGroup, varying: frozenset[str], belongs_to_row: Callable[[Scalar], bool]
) -> dict[str, ShiftedSum]:
    """Sums that can be computed in the pass of a maximum, at most one for each maximum.

    That is the denominator of softmax, log-softmax and logsumexp, however they are written.
    """
    depth = _passes_needed(group, {})
    bodies: dict[str, Scalar] = {}

    def expand(node: Scalar) -> Scalar | None:
        return bodies.get(node.buffer) if isinstance(node, Load) else None

    found: dict[str, ShiftedSum] = {}
    maxima: dict[Scalar, str] = {}
    for m in group.members:
        body = rewrite(m.body, expand)
        if m.output in varying:
            bodies[m.output] = body
        elif m.reduction == "maximum" and body.dtype.compute == "f32":
            maxima[body] = m.output
        elif m.reduction == "sum" and (power := power_of(body)) is not None:
            value, shift = power
            largest = maxima.get(value)
            if largest is None or not belongs_to_row(shift):
                continue
            if depth[m.output] > depth[largest]:
                found[m.output] = ShiftedSum(largest, shift)
                del maxima[value]
    return found


def power_of(body: Scalar) -> tuple[Scalar, Scalar] | None:
    """(v, shift) of exp(v − shift); None of anything else."""
    match body:
        case Op("exp" | "fast_exp", (Op("sub", (value, shift)),)):
            return value, shift
    return None


# -- tilings ---------------------------------------------------------------------------------------

# Accesses of an invocation that are in flight together, by `RowTiling.run`.
_IN_FLIGHT = {1: 4, 4: 4, 8: 2}


def choose_row_tiling(
    rows: Expr,
    length: Expr,
    elements_fast: bool,
    target: Target,
    several_phases: bool,
    vector: int = VECTOR,
    run: int = 1,
) -> RowTiling:
    """The tiling for ``rows`` rows of ``length`` elements, of which ``vector`` may be one load.

    ``run``: see `RowTiling`; it is 1 where it does not divide the row.

    A single reduction reads its row once, so long rows loop; with several phases the row is kept in
    registers when it fits.
    """
    machine, limit = target.machine, target.workgroup_invocations
    if not elements_fast:
        return _column_tiling(rows, length, limit, machine)
    # Half of its registers may hold an invocation's share of a row where 4 workgroups are resident.
    registers = machine.registers // (4 * machine.workgroup_invocations) // 2
    lanes = vector if is_multiple_of(length, vector) else 1
    count, most = magnitude(length), upper_bound(length)
    if count is None or most is None:
        # SwiftShader took ten minutes to compile four copies of positions in pairs of words.
        unroll = 1 if target.software and not target.has_int64 else 4
        return RowTiling(min(128, limit), 1, True, lanes, None, unroll)
    vectors, most_vectors = -(-count // lanes), -(-most // lanes)
    if length.divisor // lanes % run:
        run = 1
    # As many bytes in flight with scalar loads as half of the vectors would be.
    unroll = run * _IN_FLIGHT[run] if lanes > 1 else 8
    threads = min(limit, power_of_two_at_least(-(-vectors // (unroll if lanes > 1 else 4))))
    subgroup = target.subgroup_size
    known = magnitude(rows)
    many = known is not None and known >= 4 * 8 * machine.multiprocessors
    if several_phases and many and subgroup and most_vectors * lanes <= subgroup * registers:
        threads = min(threads, subgroup)  # reductions without barriers and workgroup memory
    if vectors > 16 * limit and target.max_workgroup_invocations >= 1024:
        threads = 1024
    # The longest rows of a class are kept, too.
    while several_phases and threads < limit and most_vectors * lanes > threads * registers:
        threads *= 2
    share = max(1, limit // threads)
    if known is not None:
        share = min(share, power_of_two_at_least(known))
    runs = -(-most_vectors // (threads * run))
    chunks: int | None = runs * run
    assert chunks is not None
    if (several_phases and chunks * lanes > registers) or (not several_phases and runs > 8):
        chunks = None
    return RowTiling(threads, share, True, lanes, chunks, unroll, run)


def _column_tiling(rows: Expr, length: Expr, limit: int, machine: Machine) -> RowTiling:
    count = _number(magnitude(rows), 1 << 16)
    n, most = _number(magnitude(length), 256), upper_bound(length)
    threads, in_flight = 1, machine.scaled(1 << 17)
    while threads < 16 and threads * 8 <= n and count * threads < in_flight:
        threads *= 2
    share = max(1, min(limit // threads, power_of_two_at_least(count)))
    chunks = None if most is None else -(-most // threads)
    keep = chunks is not None and chunks <= 16
    # Loads in flight: 8192 × 8192 are summed in 73 µs on an H200, in fours in 78.
    return RowTiling(threads, share, False, 1, chunks if keep else None, unroll=8)


def _number(known: int | None, otherwise: int) -> int:
    return otherwise if known is None else known
