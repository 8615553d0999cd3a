"""Small maps over the same points share a dispatch, although none reads what another one computes.

A dispatch costs as much time as a large GPU needs for megabytes: counters of layers, sines beside
cosines.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import or_

from ...ir.access import typical_numel
from ...ir.graph import KernelGroup, MapGroup, Schedule
from ...symbolic.sizes import Expr, product
from ...target import Target
from .. import cost
from .clusters import Clusters
from .fusion import MAX_MEMBERS


def join_small_maps(schedule: Schedule, target: Target) -> Schedule:
    """Joins independent small map groups over equal ranges: one kernel computes all of them."""
    found: dict[tuple[Expr, ...], list[tuple[int, MapGroup]]] = {}
    for k, group in enumerate(schedule.groups):
        if isinstance(group, MapGroup):
            points = typical_numel(product(group.ranges))
            if cost.is_small_map(points, target):
                found.setdefault(group.ranges, []).append((k, group))
    candidates = [numbers for numbers in found.values() if len(numbers) > 1]
    if not candidates:
        return schedule
    clusters = Clusters(schedule, target)
    for numbers in candidates:
        _join_all(clusters, numbers)
    groups = (_as_group([schedule.groups[m] for m in joined]) for joined in clusters.in_order())
    return replace(schedule, groups=tuple(groups))


def _join_all(clusters: Clusters, candidates: list[tuple[int, MapGroup]]) -> None:
    members: dict[int, int] = {}
    for k, group in candidates:
        count = len(group.members)
        into = next(
            (c for c in members if members[c] + count <= MAX_MEMBERS and _fits(clusters, k, c)),
            None,
        )
        if into is None:
            members[k] = count
        else:
            clusters.join(k, into)
            members[into] += count


def _fits(clusters: Clusters, k: int, cluster: int) -> bool:
    """Whether two groups may be one kernel: the bindings fit, and neither needs the other."""
    bound = reduce(or_, (clusters.buffers[m] for m in (*clusters.members[cluster], k)))
    return clusters.bindings(bound) <= clusters.target.max_storage_buffers and clusters.independent(
        k, cluster
    )


def _as_group(groups: list[KernelGroup]) -> KernelGroup:
    if len(groups) == 1:
        return groups[0]
    maps = [group for group in groups if isinstance(group, MapGroup)]
    return MapGroup(maps[0].ranges, tuple(m for group in maps for m in group.members))
