"""Maps over the same points become one where one reads what the other one computes there.

Fusion lets a node join one of the groups that it reads from; those of a node that reads from
several, as an optimizer's step reads two averages, meet here.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.graph import Buffer, MapGroup, Schedule
from ...symbolic.sizes import Expr, linearize
from ...target import Target
from ..mapping import reads_agree
from .clusters import Clusters
from .fusion import MAX_MEMBERS


def join_connected_maps(schedule: Schedule, target: Target) -> Schedule:
    """The schedule in which maps over the same points are one map, if one reads the other.

    A value is then passed in a register, and stored only if other kernels read it or the graph
    returns it.
    """
    clusters = Clusters(schedule, target)
    maps = {k: g for k, g in enumerate(schedule.groups) if isinstance(g, MapGroup)}
    for k, group in enumerate(schedule.groups):
        if not isinstance(group, MapGroup):
            continue
        reads = clusters.buffers[k].reads
        for first in sorted({clusters.writer.get(n, k) for n in reads} - {k}, reverse=True):
            one, two = clusters.of[first], clusters.of[k]
            if one != two and one in maps and _may_join(clusters, maps[one], maps[two], one, two):
                clusters.join(two, one)
                maps[one] = MapGroup(maps[one].ranges, maps[one].members + maps.pop(two).members)
    if len(clusters.members) == len(schedule.groups):
        return schedule
    order = [found[0] for found in clusters.in_order()]
    needed = set(schedule.graph.returned)
    for k, found in enumerate(clusters.buffers):
        needed |= {
            n for n in found.reads if clusters.of[clusters.writer.get(n, k)] != clusters.of[k]
        }
    groups = (
        _stored(maps[k], needed) if k in maps else schedule.groups[k]
        for k in (clusters.of[m] for m in order)
    )
    return replace(schedule, groups=tuple(groups))


def _may_join(clusters: Clusters, first: MapGroup, second: MapGroup, one: int, two: int) -> bool:
    """Whether the second of two clusters, which needs the first one, may be computed with it."""
    computed = {member.output: member.index for member in first.members}
    buffers = clusters.schedule.graph.buffers
    found = [clusters.buffers[m] for m in clusters.members[one] + clusters.members[two]]
    memory = frozenset().union(*map(clusters.memory, found))
    return (
        first.ranges == second.ranges
        and len(first.members) + len(second.members) <= MAX_MEMBERS
        and len({*_places(first, buffers), *_places(second, buffers)}) == 1
        and all(reads_agree(member.body, computed) for member in second.members)
        and clusters.windows(memory) <= clusters.target.max_storage_buffers
        and not clusters.needs_by_detour(two, one)
    )


def _places(group: MapGroup, buffers: dict[str, Buffer]) -> list[Expr]:
    """Where a group writes: groups that write in different orders are best apart."""
    return [linearize(m.index, buffers[m.output].strides) for m in group.members if m.store]


def _stored(group: MapGroup, needed: set[str]) -> MapGroup:
    members = (replace(m, store=m.store and m.output in needed) for m in group.members)
    return replace(group, members=tuple(members))
