"""Products of one operand in one dispatch: attention's query, key and value, the gates of a cell.

Each alone has too few tiles to fill a large GPU, or, with a few rows, little more work than a
dispatch costs. Side by side they have enough, and share the operand's way through the caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from ..ir.access import typical_numel
from ..ir.graph import AnchorGroup, GroupBuffers, KernelGroup, Schedule, SiblingGroup, buffers_of
from ..ir.nodes import Contraction
from ..sizes import product
from ..target import Target
from .order import topological_order

# A result of this many elements fills a large GPU by itself: two workgroups, of 64 × 128 each, for
# each of 130 multiprocessors.
_FULL = 260 * 64 * 128
# Each sibling is code in the kernel.
_MOST = 8


def join_siblings(schedule: Schedule, target: Target) -> Schedule:
    """Small contractions with an operand in common, and independent, become one group.

    A kernel that computes several keeps an epilogue, and a result buffer, for each: layouts and
    fusion stay what they are for products that are computed one by one.
    """
    clusters = _Clusters(schedule, target)
    for key in (_same_lhs, _same_rhs):
        found: dict[Hashable, list[int]] = {}
        for k, group in enumerate(schedule.groups):
            if isinstance(group, AnchorGroup) and isinstance(group.anchor, Contraction):
                node = group.anchor
                if _is_small(node) and len(clusters.members[clusters.of[k]]) == 1:
                    found.setdefault((key(node), _in_common(node)), []).append(k)
        for candidates in found.values():
            clusters.join_all(candidates)
    return Schedule(schedule.graph, tuple(clusters.groups()))


def _same_lhs(node: Contraction) -> Hashable:
    return node.lhs, node.rows


def _same_rhs(node: Contraction) -> Hashable:
    return node.rhs, node.columns


def _in_common(node: Contraction) -> Hashable:
    return product(node.batch), product(node.inner), node.lhs.dtype


def _is_small(node: Contraction) -> bool:
    return typical_numel(product((*node.batch, *node.rows, *node.columns))) < _FULL


class _Clusters:
    """A partition of a schedule's groups into what one kernel computes.

    Attributes:
        of: the cluster of each group, named by its first member.
        members: the groups of each cluster.
    """

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self.schedule = schedule
        self.target = target
        self.of = list(range(len(schedule.groups)))
        self.members = {k: [k] for k in self.of}
        self.buffers: list[GroupBuffers] = [buffers_of(group) for group in schedule.groups]
        writer = {name: k for k, found in enumerate(self.buffers) for name in found.stored}
        self.needs = {
            k: {writer[name] for name in found.reads if name in writer}
            for k, found in enumerate(self.buffers)
        }

    def join_all(self, candidates: Sequence[int]) -> None:
        """Joins groups to as few clusters as dependencies and bindings allow."""
        opened: list[int] = []
        for k in candidates:
            cluster = next((c for c in opened if self._may_join(k, c)), None)
            if cluster is None:
                opened.append(k)
                continue
            self.of[k] = cluster
            self.members[cluster].append(k)
            self.needs[cluster] |= self.needs.pop(k)
            del self.members[k]

    def groups(self) -> Iterator[KernelGroup]:
        """The clusters in an order in which each follows what it needs."""
        of = self.of
        needs = [{of[n] for n in self.needs.get(k, ())} for k in range(len(of))]
        for k in topological_order(needs):
            if of[k] != k:
                continue
            members = [self.schedule.groups[m] for m in self.members[k]]
            anchors = tuple(group for group in members if isinstance(group, AnchorGroup))
            yield SiblingGroup(anchors) if len(members) > 1 else members[0]

    def _may_join(self, k: int, cluster: int) -> bool:
        members = self.members[cluster]
        if len(members) >= _MOST or self._depends(k, cluster) or self._depends(cluster, k):
            return False
        bound = [self.buffers[m].reads | self.buffers[m].stored for m in (*members, k)]
        windows = sum(self._windows(name) for name in frozenset().union(*bound))
        return windows <= self.target.max_storage_buffers

    def _depends(self, cluster: int, on: int) -> bool:
        """Whether a cluster (transitively) needs another one to have run."""
        stack, seen = [cluster], {cluster}
        while stack:
            for need in self.needs[stack.pop()]:
                current = self.of[need]
                if current == on:
                    return True
                if current not in seen:
                    seen.add(current)
                    stack.append(current)
        return False

    def _windows(self, name: str) -> int:
        """Bindings that a buffer takes."""
        nbytes = self.schedule.graph.buffers[name].nbytes
        if not nbytes.is_constant:
            return 1
        return max(1, -(-int(nbytes) // self.target.max_binding_nbytes))
