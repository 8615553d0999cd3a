"""Products of one operand in one dispatch.

Each alone has too few tiles to fill a large GPU, or, with a few rows, little more work than a
dispatch costs. Side by side they have enough, and share the operand's way through the caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ...ir.anchors import access_pattern
from ...ir.buffers import Buffer
from ...ir.graph import AnchorGroup, KernelGroup, PairGroup, Schedule, SiblingGroup, buffers_of
from ...ir.nodes import Contraction
from ...ir.scalar import loads_of
from ...symbolic.sizes import Expr, product, typical
from ...target import Target
from .. import cost
from ..mapping import reads_agree
from .clusters import Clusters

# -- pairs -----------------------------------------------------------------------------------------


def join_pairs(schedule: Schedule, target: Target) -> Schedule:
    """Joins two contractions of equal sizes and lhs if the epilogue of one reads the other.

    As in silu(x·gate) * (x·up). Both become a `PairGroup`, in which every invocation computes the
    same element of both: the first result is neither written nor read back.
    """
    clusters = Clusters(schedule, target)
    pairs: dict[int, PairGroup] = {}
    for k, group in enumerate(schedule.groups):
        for first in sorted({clusters.writer.get(n, k) for n in clusters.buffers[k].reads} - {k}):
            if len(clusters.members.get(first, ())) != 1:
                continue
            kept = {n for n in clusters.buffers[first].stored if clusters.readers[n] - {k}}
            pair = _pair(schedule.groups[first], group, schedule.graph.returned | kept)
            if pair is None or not clusters.fits(buffers_of(pair)):
                continue
            if not clusters.needs_by_detour(k, first):
                clusters.join(k, first)
                pairs[first] = pair
                break
    order = (members[0] for members in clusters.in_order())
    return replace(schedule, groups=tuple(pairs.get(k, schedule.groups[k]) for k in order))


def _pair(first: KernelGroup, second: KernelGroup, needed: frozenset[str]) -> PairGroup | None:
    """The pair of two groups; None unless the second's epilogue alone reads the first, in place.

    ``needed``: buffers that something besides the second group needs.
    """
    if not (isinstance(first, AnchorGroup) and isinstance(second, AnchorGroup)):
        return None
    one, two = first.anchor, second.anchor
    if not (isinstance(one, Contraction) and isinstance(two, Contraction)):
        return None
    same = one.lhs is two.lhs and _sizes(one) == _sizes(two) and one.lhs_shift is two.lhs_shift
    computed = _computed(first)
    is_apart = not any(load.buffer in computed for load in loads_of(two.rhs))
    if not (same and is_apart and all(reads_agree(m.body, computed) for m in second.epilogue)):
        return None
    kept = replace(
        first,
        epilogue=tuple(replace(m, store=m.store and m.output in needed) for m in first.epilogue),
        store_anchor=first.store_anchor and first.anchor.output in needed,
    )
    return PairGroup((kept, second))


def _sizes(node: Contraction) -> Sequence[Sequence[Expr]]:
    return node.batch, node.rows, node.columns, node.inner


def _computed(group: AnchorGroup) -> Mapping[str, Sequence[Expr]]:
    """The index of each buffer that a group computes, in its anchor's symbols."""
    found = {group.anchor.output: group.anchor.result_index}
    return found | {member.output: member.index for member in group.epilogue}


# -- siblings --------------------------------------------------------------------------------------

# Each sibling is code in the kernel.
_MOST = 8


def join_siblings(schedule: Schedule, target: Target) -> Schedule:
    """Joins small independent contractions with an operand in common to `SiblingGroup`s.

    These are attention's query, key and value, and gradients of weights.
    Each keeps its own epilogue and its own result buffer, so that layouts and fusion are the same
    as for products in kernels of their own. Those of one group are loaded and stored alike; others
    follow in kernels of their own.

    Where somebody waits for the compiler, products of more than a few rows stay alone: several that
    are alike are one kernel, which compiles in less than half of the time.
    """
    clusters = Clusters(schedule, target)
    for by_lhs in (True, False):
        found: dict[Hashable, list[int]] = {}
        for k, group in enumerate(schedule.groups):
            if isinstance(group, AnchorGroup) and isinstance(group.anchor, Contraction):
                node = group.anchor
                if _is_joined(node, target) and len(clusters.members[clusters.of[k]]) == 1:
                    operand = (node.lhs, node.rows) if by_lhs else (node.rhs, node.columns)
                    alike = node.batch, node.inner, node.lhs.dtype, node.lhs_shift is None
                    found.setdefault((operand, alike), []).append(k)
        for candidates in found.values():
            clusters.gather(candidates, lambda k, into: len(clusters.members[into]) < _MOST)
    return clusters.regrouped(lambda groups: _as_siblings(groups, schedule.graph.buffers))


def _is_joined(node: Contraction, target: Target) -> bool:
    if target.waits_for_compiler:
        return cost.are_few_rows(typical(product(node.rows)))
    elements = typical(product((*node.batch, *node.rows, *node.columns)))
    return not cost.fills_with_a_product(elements, target)


def _as_siblings(groups: list[KernelGroup], buffers: Mapping[str, Buffer]) -> Sequence[KernelGroup]:
    alike: dict[Hashable, list[AnchorGroup]] = {}
    for group in groups:
        assert isinstance(group, AnchorGroup)
        alike.setdefault(access_pattern(group, buffers), []).append(group)
    return [
        SiblingGroup(tuple(siblings)) if len(siblings) > 1 else siblings[0]
        for siblings in alike.values()
    ]
