"""Maps that do the same on different buffers share a dispatch: optimizer steps, casts, scalings.

A dispatch costs as much time as a large GPU needs for megabytes, and a parameter per kernel leaves
most of it idle. The kernel holds the code of the common body once: it loads and stores by cases.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from ...ir.canonical import canonical_form
from ...ir.graph import ForeachGroup, KernelGroup, MapGroup, Schedule
from ...ir.transposition import find_transposition
from ...target import Target
from .. import cost
from .clusters import Clusters

# Each map is two cases in the kernel, which drivers compile in more than linear time.
_MOST = 256


@dataclass
class _Open:
    """A cluster that may get further maps, and the memory that it binds."""

    cluster: int
    count: int = 0
    windows: int = 0
    bound: set[str] = field(default_factory=set)


def join_foreach(schedule: Schedule, target: Target) -> Schedule:
    """Independent maps of equal canonical form become one group, as far as bindings allow.

    Those that go through tiles stay alone.
    """
    buffers = schedule.graph.buffers
    classes: dict[Hashable, list[int]] = {}
    for k, group in enumerate(schedule.groups):
        if isinstance(group, MapGroup):
            form = canonical_form(group, buffers)
            if form is not None and find_transposition(group, buffers, target) is None:
                classes.setdefault(form.key, []).append(k)
    candidates = [numbers for numbers in classes.values() if len(numbers) > 1]
    if not candidates:
        return schedule
    clusters = Clusters(schedule, target)
    for numbers in candidates:
        _join_all(clusters, [k for k in numbers if _may_move(clusters, k)])
    groups = (_as_group([schedule.groups[m] for m in found]) for found in clusters.in_order())
    return replace(schedule, groups=tuple(groups))


def _may_move(clusters: Clusters, k: int) -> bool:
    """Whether a group may run earlier or later without much memory being used for longer.

    Large intermediates stay near the kernels that need them: side by side, all would be alive at
    once.
    """
    return cost.is_small_buffer(clusters.largest_passed(k), clusters.target)


def _join_all(clusters: Clusters, numbers: list[int]) -> None:
    opened: list[_Open] = []
    for k in numbers:
        memory = clusters.memory(clusters.buffers[k])
        into = next((place for place in opened if _fits(clusters, place, k, memory)), None)
        if into is None:
            into = _Open(k)
            opened.append(into)
        else:
            clusters.join(k, into.cluster)
        into.count += 1
        into.windows += clusters.windows(memory - into.bound)
        into.bound |= memory
        if into.count == _MOST or into.windows >= clusters.target.max_storage_buffers:
            opened.remove(into)


def _fits(clusters: Clusters, place: _Open, k: int, memory: frozenset[str]) -> bool:
    return place.windows + clusters.windows(
        memory - place.bound
    ) <= clusters.target.max_storage_buffers and clusters.independent(k, place.cluster)


def _as_group(groups: list[KernelGroup]) -> KernelGroup:
    if len(groups) == 1:
        return groups[0]
    return ForeachGroup(tuple(group for group in groups if isinstance(group, MapGroup)))
