"""Small maps over the same points share a dispatch, although none reads what another one computes.

A dispatch costs as much time as a large GPU needs for megabytes: counters of layers, sines beside
cosines, optimizer states of biases.
"""

from __future__ import annotations

from ..ir.access import typical_numel
from ..ir.graph import LoopGraph
from ..sizes import product
from ..target import Target
from .fusion import MAX_MEMBERS, Group, depends
from .mapping import extent_of

# With more points, the groups fill a GPU better than side by side in its registers.
_SMALL = 1 << 12


def join_small_maps(graph: LoopGraph, groups: list[Group], target: Target) -> list[Group]:
    """The groups, with independent small map groups over equal ranges joined."""
    into: dict[int, int] = {}
    opened: dict[tuple[object, ...], list[int]] = {}
    for at, group in enumerate(groups):
        if group.kind != "map" or typical_numel(product(map(extent_of, group.rows))) > _SMALL:
            continue
        candidates = opened.setdefault(tuple(group.rows), [])
        first = next((k for k in candidates if _may_join(groups, k, at, into, target)), None)
        if first is None:
            candidates.append(at)
            continue
        host = groups[first]
        host.members += group.members
        host.computed |= group.computed
        host.reads |= group.reads
        host.needs |= group.needs
        into[at] = first
    if not into:
        return groups
    kept = [k for k in range(len(groups)) if k not in into]
    number = {k: n for n, k in enumerate(kept)}
    for k in kept:
        groups[k].needs = {number[into.get(n, n)] for n in groups[k].needs}
    return [groups[k] for k in kept]


def _may_join(
    groups: list[Group], first: int, second: int, into: dict[int, int], target: Target
) -> bool:
    """Whether two groups may be one kernel: neither needs the other, and the bindings fit."""
    one, other = groups[first], groups[second]
    bound = one.reads | other.reads | set(one.computed) | set(other.computed)
    return (
        len(one.members) + len(other.members) <= MAX_MEMBERS
        and len(bound) <= target.max_storage_buffers
        and not depends(groups, first, second, into)
        and not depends(groups, second, first, into)
    )
