"""Small kernels of any kind that do not need each other share a dispatch.

While one token is decoded that are the products for queries, keys and values; and what writes the
caches, beside what joins the parts of attention.
"""

from __future__ import annotations

from functools import lru_cache

from .. import dtypes
from ..ir.access import typical_numel
from ..ir.graph import (
    Buffer,
    JointGroup,
    KernelGroup,
    MapGroup,
    RowGroup,
    Schedule,
    SingleGroup,
    buffers_of,
)
from ..ir.nodes import Scatter, bodies_of
from ..ir.scalar import Index, Load, Op, Scalar, loads_of, scalar_symbols, walk
from ..sizes import INT32, Expr, Symbol, is_within, product
from ..target import Target
from . import cost
from .clusters import Clusters

# Each part is code in the kernel.
_MOST = 8
# Kernels that are far from each other are seldom free to move, and to find out takes time.
_NEAR = 8
_DIVISIONS = frozenset({"trunc_divide", "floor_divide", "fmod", "remainder"})


def join_small_kernels(schedule: Schedule, target: Target) -> Schedule:
    """Independent small groups, of kinds that have known sizes, become one group."""
    clusters = Clusters(schedule, target)
    before = _Before(clusters)
    opened: list[int] = []
    for k, group in enumerate(schedule.groups):
        before.add(k)
        passed = clusters.largest_passed(k)  # side by side, all are alive at once
        if not (_is_small(group, schedule, target) and cost.may_be_passed(passed, target)):
            continue
        free = (place for place in reversed(opened) if not before.needs(k, place))
        into = next((place for place in free if _fits(clusters, k, place)), None)
        if into is None:
            opened = [*opened[1 - _NEAR :], k]
        else:
            before.join(k, into)
            clusters.join(k, into)
    groups = (_as_group([schedule.groups[m] for m in found]) for found in clusters.in_order())
    return Schedule(schedule.graph, tuple(groups))


class _Before:
    """For each cluster, those that must have run before it, while groups are added in order.

    As bits of a number: graphs of training steps have thousands of groups. None that was added
    needs a later one.
    """

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters
        self._masks: dict[int, int] = {}

    def add(self, k: int) -> None:
        """Adds a group by itself."""
        mask = 0
        for cluster in self._clusters.needs(k):
            mask |= self._masks[cluster] | 1 << cluster
        self._masks[k] = mask

    def needs(self, k: int, cluster: int) -> bool:
        """Whether the last group that was added needs a cluster."""
        return bool(self._masks[k] >> cluster & 1)

    def join(self, k: int, cluster: int) -> None:
        """Puts the last group that was added into a cluster."""
        mask = self._masks[cluster] | self._masks.pop(k)
        if mask == self._masks[cluster]:
            return
        self._masks[cluster] = mask
        for other, own in self._masks.items():
            if own >> cluster & 1:
                self._masks[other] = own | mask


def _is_small(group: KernelGroup, schedule: Schedule, target: Target) -> bool:
    """Whether a group is of a kind that may be a part, of known size, and moves few bytes."""
    buffers = schedule.graph.buffers
    match group:
        case MapGroup(points, members):
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
    written = sum(min(int(count), typical_numel(b.numel)) * b.dtype.itemsize for b in stored)
    return cost.is_small_kernel(read + written, target)


@lru_cache(maxsize=1 << 13)
def _has_wide_division(body: Scalar) -> bool:
    """Whether 64-bit integers are divided.

    GPUs do that in dozens of instructions. Beside other parts, NVIDIA's compiler takes it for a
    reason to assume that the others' floats are finite, or dies.
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
    """Bytes that a load reads at all points: no more than there are, or than it tells apart."""
    symbols = {symbol for entry in load.index for symbol in scalar_symbols(entry)}
    places = typical_numel(product(s.extent for s in symbols if s.extent is not None))
    return min(places, typical_numel(buffer.numel)) * buffer.dtype.itemsize


def _fits(clusters: Clusters, k: int, cluster: int) -> bool:
    """Whether a kernel may have one more part: in their number, and in its bindings."""
    members = clusters.members[cluster]
    bound = frozenset().union(*(clusters.memory(clusters.buffers[m]) for m in (*members, k)))
    return len(members) < _MOST and clusters.windows(bound) <= clusters.target.max_storage_buffers


def _as_group(groups: list[KernelGroup]) -> KernelGroup:
    if len(groups) == 1:
        return groups[0]
    parts = (group for group in groups if isinstance(group, MapGroup | RowGroup | SingleGroup))
    return JointGroup(tuple(parts))
