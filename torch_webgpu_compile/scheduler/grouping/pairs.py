"""Two products of one operand, of which one's epilogue uses the other: silu(x·gate) * (x·up).

When every invocation computes both, the first result is neither written nor read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...ir.graph import AnchorGroup, KernelGroup, PairGroup, Schedule, buffers_of
from ...ir.nodes import Contraction
from ...ir.scalar import loads_of
from ...symbolic.sizes import Expr
from ...target import Target
from ..mapping import reads_agree
from .clusters import Clusters


def join_pairs(schedule: Schedule, target: Target) -> Schedule:
    """Joins two contractions of equal sizes and lhs if the epilogue of one reads the other.

    Both become a `PairGroup`, in which every invocation computes the same element of both.
    """
    clusters = Clusters(schedule, target)
    readers: dict[str, set[int]] = {}
    for k, found in enumerate(clusters.buffers):
        for name in found.reads:
            readers.setdefault(name, set()).add(k)
    pairs: dict[int, PairGroup] = {}
    for k, group in enumerate(schedule.groups):
        for first in sorted({clusters.writer.get(n, k) for n in clusters.buffers[k].reads} - {k}):
            if len(clusters.members.get(first, ())) != 1 or not _match(
                schedule.groups[first], group, clusters
            ):
                continue
            needed = schedule.graph.returned | {n for n in readers if readers[n] - {k}}
            pair = _pair(schedule.groups[first], group, needed)
            if clusters.bindings(buffers_of(pair)) <= target.max_storage_buffers and not (
                clusters.needs_by_detour(k, first)
            ):
                clusters.join(k, first)
                pairs[first] = pair
                break
    order = (members[0] for members in clusters.in_order())
    return replace(schedule, groups=tuple(pairs.get(k, schedule.groups[k]) for k in order))


def _match(first: KernelGroup, second: KernelGroup, clusters: Clusters) -> bool:
    """Whether the second's epilogue, and nothing else of it, reads the first's at its own point."""
    if not (isinstance(first, AnchorGroup) and isinstance(second, AnchorGroup)):
        return False
    one, two = first.anchor, second.anchor
    if not (isinstance(one, Contraction) and isinstance(two, Contraction)):
        return False
    same = one.lhs is two.lhs and _sizes(one) == _sizes(two)
    computed = _computed(first)
    return (
        same
        and not any(load.buffer in computed for load in loads_of(two.rhs))
        and all(reads_agree(member.body, computed) for member in second.epilogue)
    )


def _sizes(node: Contraction) -> Sequence[Sequence[Expr]]:
    return node.batch, node.rows, node.columns, node.inner


def _computed(group: AnchorGroup) -> Mapping[str, Sequence[Expr]]:
    """The index of each buffer that a group computes, in its anchor's symbols."""
    found = {group.anchor.output: group.anchor.result_index}
    return found | {member.output: member.index for member in group.epilogue}


def _pair(first: KernelGroup, second: KernelGroup, needed: frozenset[str]) -> PairGroup:
    """``needed``: buffers that something besides the second group needs."""
    assert isinstance(first, AnchorGroup)
    assert isinstance(second, AnchorGroup)
    kept = replace(
        first,
        epilogue=tuple(replace(m, store=m.store and m.output in needed) for m in first.epilogue),
        store_anchor=first.store_anchor and first.anchor.output in needed,
    )
    return PairGroup((kept, second))
