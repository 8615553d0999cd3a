"""Groups in execution order."""

from __future__ import annotations

import heapq

from ..errors import VerificationError
from ..ir.graph import LoopGraph, Schedule
from ..ir.nodes import inputs_of
from .fusion import Group, finish


def order_groups(graph: LoopGraph, groups: list[Group]) -> Schedule:
    """A topological order, earliest created first, and the buffers that each group must store."""
    waiting = [set(g.needs) for g in groups]
    ready = [k for k, needs in enumerate(waiting) if not needs]
    followers: list[list[int]] = [[] for _ in groups]
    for k, needs in enumerate(waiting):
        for n in needs:
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
    if len(order) != len(groups):
        raise VerificationError("kernel groups depend on each other in a cycle")
    stored = set(graph.returned)
    for group in groups:
        stored |= group.reads - set(group.computed)
        if group.kind == "single" and group.anchor is not None:
            stored |= set(inputs_of(group.anchor))
    return Schedule(graph, tuple(finish(groups[k], stored) for k in order))
