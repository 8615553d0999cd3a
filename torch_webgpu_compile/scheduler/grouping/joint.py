"""Small kernels of any kind that do not depend on each other share a dispatch.

In the decoding of one token, a language model's typical graph, these are the products for queries,
keys and values, which are reductions there, and the updates of the caches beside the kernel that
joins the parts of attention.
"""

from __future__ import annotations

from functools import cache, lru_cache

from ... import dtypes
from ...ir.buffers import Buffer
from ...ir.graph import (
    JointGroup,
    KernelGroup,
    MapGroup,
    RowGroup,
    Schedule,
    SingleGroup,
    buffers_of,
)
from ...ir.nodes import Scatter, bodies_of
from ...ir.rows import RowStrategy, choose_row_strategy, joint_nbytes
from ...ir.scalar import Index, Load, Op, Scalar, loads_of, scalar_symbols, walk
from ...ir.transposition import find_transposition
from ...symbolic.sizes import INT32, Expr, Symbol, is_within, product, typical
from ...target import Target
from .. import cost
from .clusters import Clusters

# Parts of a kernel: the code of each is in it.
_MOST = 8
# Clusters that are tried: groups further apart in execution order nearly always depend on each
# other, and testing them takes compile time.
_NEAR = 8
_DIVISIONS = frozenset({"trunc_divide", "floor_divide", "fmod", "remainder"})


def join_small_kernels(schedule: Schedule, target: Target) -> Schedule:
    """Joins independent small kernel groups to a `JointGroup`, which is one dispatch.

    Groups are small if they are maps, rows or scatters of known size that move at most 32 MiB; maps
    that go through tiles stay alone. Each takes the nearest of the last 8 clusters before it that
    it does not depend on and that has a part, bindings and workgroup memory to spare.
    """
    clusters = Clusters(schedule, target)

    @cache
    def strategy(k: int) -> RowStrategy:
        group = schedule.groups[k]
        assert isinstance(group, RowGroup)
        return choose_row_strategy(group, schedule.graph.buffers, target)

    def fits(k: int, cluster: int) -> bool:
        """Whether a cluster may take a group: by its parts, bindings, workgroup memory."""
        members = [*clusters.members[cluster], k]
        if len(members) > _MOST or not clusters.are_bound_together(k, cluster):
            return False
        rows = [strategy(m) for m in members if isinstance(schedule.groups[m], RowGroup)]
        return joint_nbytes(rows, target) <= target.max_workgroup_nbytes

    opened: list[int] = []
    for k, group in enumerate(schedule.groups):
        passed = clusters.largest_passed(k)  # side by side, all are alive at once
        if not (is_small(group, schedule, target) and cost.may_be_passed(passed, target)):
            continue
        free = (place for place in reversed(opened) if not clusters.leads_to(place, k))
        into = next((place for place in free if fits(k, place)), None)
        if into is None:
            opened = [*opened[1 - _NEAR :], k]
        else:
            clusters.join(k, into)
    return clusters.regrouped(_as_joint)


def is_small(group: KernelGroup, schedule: Schedule, target: Target) -> bool:
    """Whether a group may be a part: a map, rows or scatter of known size that moves few bytes."""
    buffers = schedule.graph.buffers
    match group:
        case MapGroup(points, members):
            if find_transposition(group, buffers, target) is not None:
                return False  # tiles are used where they gain more than a dispatch costs
            bodies = [member.body for member in members]
        case RowGroup(rows, elements, members):
            points, bodies = (*rows, *elements), [member.body for member in members]
        case SingleGroup(Scatter() as node):
            if buffers[node.output].shares is None:
                return False  # a copy of the initial contents comes first
            points, bodies = node.ranges, list(bodies_of(node))
        case _:
            return False
    count = product(points)
    if not count.is_constant or count.constant == 0 or any(map(_has_wide_division, bodies)):
        return False
    loads = {load for body in bodies for load in loads_of(body)}
    read = sum(_nbytes_read(load, buffers[load.buffer]) for load in loads)
    stored = (buffers[name] for name in buffers_of(group).stored)
    written = sum(min(int(count), typical(b.numel)) * b.dtype.itemsize for b in stored)
    return cost.is_small_kernel(read + written, target)


@lru_cache(maxsize=1 << 13)
def _has_wide_division(body: Scalar) -> bool:
    """Whether a body divides 64-bit integers, in its values or in its indices.

    That takes a GPU dozens of instructions. NVIDIA's compiler assumes of floats beside it that they
    are finite, which changes what the other parts compute, or crashes.
    """
    return any(
        node.name in _DIVISIONS and node.dtype is dtypes.int64
        if isinstance(node, Op)
        else isinstance(node, Index) and _divides_wide(node.expr)
        for node in walk(body)
    )


def _divides_wide(expr: Expr) -> bool:
    return any(
        not all(is_within(part, INT32) for part in (atom.numerator, atom.denominator))
        for monomial, _ in expr.terms
        for atom in monomial
        if not isinstance(atom, Symbol)
    )


def _nbytes_read(load: Load, buffer: Buffer) -> int:
    """Bytes that a load reads at all points of its kernel.

    At most the buffer's size, and at most one element for each value of the symbols in its index.
    """
    symbols = {symbol for entry in load.index for symbol in scalar_symbols(entry)}
    places = typical(product(s.extent for s in symbols if s.extent is not None))
    return min(places, typical(buffer.numel)) * buffer.dtype.itemsize


def _as_joint(groups: list[KernelGroup]) -> list[KernelGroup]:
    parts = (group for group in groups if isinstance(group, MapGroup | RowGroup | SingleGroup))
    return [JointGroup(tuple(parts))]
