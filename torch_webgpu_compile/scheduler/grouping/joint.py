"""Small kernels of any kind that do not depend on each other share a dispatch.

In the decoding of one token, a language model's typical graph, these are the products for queries,
keys and values, which are reductions there, and the updates of the caches beside the kernel that
joins the parts of attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
    memory = _Memory(schedule, target)
    before = _Before(clusters)
    opened: list[int] = []
    for k, group in enumerate(schedule.groups):
        before.add(k)
        passed = clusters.largest_passed(k)  # side by side, all are alive at once
        if not (is_small(group, schedule, target) and cost.may_be_passed(passed, target)):
            continue
        free = (place for place in reversed(opened) if not before.needs(k, place))
        into = next((place for place in free if _fits(clusters, memory, k, place)), None)
        if into is None:
            opened = [*opened[1 - _NEAR :], k]
        else:
            before.join(k, into)
            clusters.join(k, into)
    return clusters.regrouped(_as_joint)


class _Memory:
    """The workgroup memory of row groups, by number, that are computed side by side."""

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self._schedule = schedule
        self._target = target
        self._strategies: dict[int, RowStrategy] = {}

    def fits(self, groups: Iterable[int]) -> bool:
        """Whether groups fit in one kernel, of which only row groups have workgroup memory."""
        rows = [k for k in groups if isinstance(self._schedule.groups[k], RowGroup)]
        nbytes = joint_nbytes([self._strategy(k) for k in rows], self._target)
        return nbytes <= self._target.max_workgroup_nbytes

    def _strategy(self, k: int) -> RowStrategy:
        found = self._strategies.get(k)
        if found is None:
            group = self._schedule.groups[k]
            assert isinstance(group, RowGroup)
            found = choose_row_strategy(group, self._schedule.graph.buffers, self._target)
            self._strategies[k] = found
        return found


class _Before:
    """The dependencies between clusters, while groups are added in execution order.

    ``_masks[c]`` has bit d set if cluster d must run before cluster c. Integers as bit sets are
    fast enough for training steps of thousands of groups. A group that was added never depends on a
    later one.
    """

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        self._masks: dict[int, int] = {}

    def add(self, k: int) -> None:
        """Adds group ``k`` as a cluster of its own, after the clusters that it reads from."""
        mask = 0
        for cluster in self._clusters.needs(k):
            mask |= self._masks[cluster] | 1 << cluster
        self._masks[k] = mask

    def needs(self, k: int, cluster: int) -> bool:
        """Whether group ``k``, the last one that was added, must run after a cluster."""
        return bool(self._masks[k] >> cluster & 1)

    def join(self, k: int, cluster: int) -> None:
        """Puts group ``k``, the last one that was added, into a cluster.

        What must run before the group must now run before the cluster, and before all that needs
        it.
        """
        mask = self._masks[cluster] | self._masks.pop(k)
        if mask == self._masks[cluster]:
            return
        self._masks[cluster] = mask
        for other, own in self._masks.items():
            if own >> cluster & 1:
                self._masks[other] = own | mask


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


def _fits(clusters: Clusters, memory: _Memory, k: int, cluster: int) -> bool:
    """Whether a cluster may take group ``k``: by its parts, storage bindings, workgroup memory."""
    members = [*clusters.members[cluster], k]
    together = clusters.are_bound_together(k, cluster)
    return len(members) <= _MOST and together and memory.fits(members)


def _as_joint(groups: list[KernelGroup]) -> list[KernelGroup]:
    parts = (group for group in groups if isinstance(group, MapGroup | RowGroup | SingleGroup))
    return [JointGroup(tuple(parts))]
