"""Groups in execution order."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from ...errors import VerificationError
from ...ir.graph import Schedule
from ...ir.nodes import outputs_of
from .fusion import Group, Grouping, finish


def topological_order(needs: Sequence[Collection[int]]) -> list[int]:
    """Every number after those that it needs, else the smallest first.

    Raises:
        VerificationError: they need each other.
    """
    waiting = [set(n) for n in needs]
    ready = [k for k, left in enumerate(waiting) if not left]
    followers: list[list[int]] = [[] for _ in needs]
    for k, left in enumerate(waiting):
        for n in left:
            followers[n].append(k)
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        current = heapq.heappop(ready)
        order.append(current)
        for k in followers[current]:
            waiting[k].discard(current)
            if not waiting[k]:
                heapq.heappush(ready, k)
    if len(order) != len(needs):
        raise VerificationError("kernel groups depend on each other in a cycle")
    return order


def verify_grouping(grouping: Grouping) -> None:
    """Every node is in one group, and no groups need each other.

    Raises:
        VerificationError: it is not so.
    """
    topological_order([group.needs for group in grouping.groups])
    computed = sorted(name for group in grouping.groups for name in _outputs(group))
    wanted = sorted(name for node in grouping.graph.nodes for name in outputs_of(node))
    if computed != wanted:
        raise VerificationError(f"kernel groups compute {computed}, the graph {wanted}")


def _outputs(group: Group) -> set[str]:
    anchor = () if group.anchor is None else outputs_of(group.anchor)
    return {*group.computed, *anchor}


def order_groups(grouping: Grouping) -> Schedule:
    """A topological order, earliest created first, and the buffers that each group must store."""
    graph, groups = grouping.graph, grouping.groups
    order = topological_order([g.needs for g in groups])
    stored = set(graph.returned)
    for group in groups:
        stored |= group.reads - set(group.computed)
    return Schedule(graph, tuple(finish(groups[k], stored) for k in order))
