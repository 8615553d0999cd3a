"""Maps that share a kernel: those that read each other, do the same, or are small.

A dispatch costs as much time as a large GPU needs for megabytes, and a parameter per kernel leaves
most of it idle.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from ...ir.buffers import Buffer
from ...ir.canonical import canonical_form
from ...ir.graph import ForeachGroup, KernelGroup, MapGroup, Schedule
from ...ir.transposition import find_transposition
from ...symbolic.sizes import Expr, linearize, product, typical
from ...target import Target
from .. import cost
from ..mapping import reads_agree
from .clusters import Clusters
from .fusion import MAX_MEMBERS

# -- one reads the other ---------------------------------------------------------------------------


def join_connected_maps(schedule: Schedule, target: Target) -> Schedule:
    """The schedule in which maps over the same points are one map, if one reads the other.

    Fusion lets a node join one of the groups that it reads from; those of a node that reads from
    several, as an optimizer's step reads two averages, meet here. A value is then passed in a
    register, and stored only if other kernels read it or the graph returns it.
    """
    clusters = Clusters(schedule, target)
    maps = {k: g for k, g in enumerate(schedule.groups) if isinstance(g, MapGroup)}
    for k, group in enumerate(schedule.groups):
        if not isinstance(group, MapGroup):
            continue
        reads = clusters.buffers[k].reads
        for first in sorted({clusters.writer.get(n, k) for n in reads} - {k}, reverse=True):
            one, two = clusters.of[first], clusters.of[k]
            if one != two and one in maps and _may_connect(clusters, maps, one, two):
                clusters.join(two, one)
                maps[one] = MapGroup(maps[one].ranges, maps[one].members + maps.pop(two).members)
    if len(clusters.members) == len(schedule.groups):
        return schedule
    needed = set(schedule.graph.returned)
    for k, found in enumerate(clusters.buffers):
        needed |= {
            n for n in found.reads if clusters.of[clusters.writer.get(n, k)] != clusters.of[k]
        }
    groups = (
        _stored(maps[k], needed) if k in maps else schedule.groups[k]
        for k in (clusters.of[members[0]] for members in clusters.in_order())
    )
    return replace(schedule, groups=tuple(groups))


def _may_connect(clusters: Clusters, maps: Mapping[int, MapGroup], one: int, two: int) -> bool:
    """Whether the second of two clusters, which needs the first one, may be computed with it."""
    first, second = maps[one], maps[two]
    computed = {member.output: member.index for member in first.members}
    buffers = clusters.schedule.graph.buffers
    return (
        first.ranges == second.ranges
        and len(first.members) + len(second.members) <= MAX_MEMBERS
        and len({*_places(first, buffers), *_places(second, buffers)}) == 1
        and all(reads_agree(member.body, computed) for member in second.members)
        and clusters.are_bound_together(two, one)
        and not clusters.needs_by_detour(two, one)
    )


def _places(group: MapGroup, buffers: dict[str, Buffer]) -> list[Expr]:
    """The places that a group writes: groups that write in different orders are best apart."""
    return [linearize(m.index, buffers[m.output].strides) for m in group.members if m.store]


def _stored(group: MapGroup, needed: set[str]) -> MapGroup:
    members = (replace(m, store=m.store and m.output in needed) for m in group.members)
    return replace(group, members=tuple(members))


# -- all do the same -------------------------------------------------------------------------------

# Each map is two cases in the kernel, which drivers compile in more than linear time.
_MOST_EQUAL = 256


def join_foreach(schedule: Schedule, target: Target) -> Schedule:
    """Independent maps of equal canonical form become one group, as far as bindings allow.

    These are optimizer steps, casts, scalings. The kernel holds the code of the common body once:
    it loads and stores by cases. Maps that go through tiles stay alone. So do those that would
    keep large intermediates alive, which stay near the kernels that need them.
    """
    buffers = schedule.graph.buffers
    classes: dict[Hashable, list[int]] = {}
    for k, group in enumerate(schedule.groups):
        if isinstance(group, MapGroup) and product(group.ranges).is_constant:
            form = canonical_form(group, buffers)
            if form is not None and find_transposition(group, buffers, target) is None:
                classes.setdefault(form.key, []).append(k)
    candidates = [numbers for numbers in classes.values() if len(numbers) > 1]
    if not candidates:
        return schedule
    clusters = Clusters(schedule, target)
    for numbers in candidates:
        moved = [k for k in numbers if cost.is_small_buffer(clusters.largest_passed(k), target)]
        clusters.gather(moved, lambda k, into: len(clusters.members[into]) < _MOST_EQUAL)

    def as_one(groups: list[KernelGroup]) -> list[KernelGroup]:
        return [ForeachGroup(tuple(group for group in groups if isinstance(group, MapGroup)))]

    return clusters.regrouped(as_one)


# -- small ones ------------------------------------------------------------------------------------


def join_small_maps(schedule: Schedule, target: Target) -> Schedule:
    """Joins independent small map groups over equal ranges: one kernel computes all of them.

    These are counters of layers, sines beside cosines.
    """
    found: dict[tuple[Expr, ...], list[int]] = {}
    counts: dict[int, int] = {}
    for k, group in enumerate(schedule.groups):
        if isinstance(group, MapGroup):
            counts[k] = len(group.members)
            if cost.is_small_map(typical(product(group.ranges)), target):
                found.setdefault(group.ranges, []).append(k)
    candidates = [numbers for numbers in found.values() if len(numbers) > 1]
    if not candidates:
        return schedule
    clusters = Clusters(schedule, target)

    def has_room(k: int, into: int) -> bool:
        return counts[k] + sum(counts[m] for m in clusters.members[into]) <= MAX_MEMBERS

    for numbers in candidates:
        clusters.gather(numbers, has_room)
    return clusters.regrouped(_as_map)


def _as_map(groups: list[KernelGroup]) -> list[KernelGroup]:
    maps = [group for group in groups if isinstance(group, MapGroup)]
    return [MapGroup(maps[0].ranges, tuple(m for group in maps for m in group.members))]
