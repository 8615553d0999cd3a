"""Groups in execution order."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import pairwise

from ...errors import VerificationError
from ...ir.graph import Schedule
from ...ir.nodes import HostCall, inputs_of, outputs_of
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


def _host_calls_in_turn(
    grouping: Grouping, needs: Sequence[Collection[int]]
) -> list[Collection[int]]:
    """``needs``, and each host call needs the one before it in the graph."""
    place = {
        name: k
        for k, group in enumerate(grouping.groups)
        if isinstance(group.anchor, HostCall)
        for name in outputs_of(group.anchor)
    }
    calls = [node for node in grouping.graph.nodes if isinstance(node, HostCall)]
    at = [place[outputs_of(node)[0]] for node in calls]
    found = list(needs)
    for before, k in pairwise(at):
        found[k] = {*found[k], before}
    return found


def order_groups(grouping: Grouping) -> Schedule:
    """A topological order, earliest created first, and the buffers that each group must store.

    Host calls come as in the graph: collectives must in all processes, though shards of other sizes
    are fused in another way in some.
    """
    graph, groups = grouping.graph, grouping.groups
    needs = [g.needs for g in groups]
    try:
        order = topological_order(_host_calls_in_turn(grouping, needs))
    except VerificationError:  # a group computes for a host call, and reads what a later one gave
        order = topological_order(needs)
    stored = set(graph.returned)
    for group in groups:
        stored |= group.reads - set(group.computed)
        if group.kind == "single" and group.anchor is not None:
            stored |= set(inputs_of(group.anchor))
    return Schedule(graph, tuple(finish(groups[k], stored) for k in order))
