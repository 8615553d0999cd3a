"""Products of one operand in one dispatch: attention's query, key and value, gradients of weights.

Each alone has too few tiles to fill a large GPU, or, with a few rows, little more work than a
dispatch costs. Side by side they have enough, and share the operand's way through the caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from ...ir.access import typical_numel
from ...ir.anchors import access_pattern
from ...ir.graph import AnchorGroup, Buffer, KernelGroup, Schedule, SiblingGroup
from ...ir.nodes import Contraction
from ...symbolic.sizes import product
from ...target import Target
from .. import cost
from .clusters import Clusters

# Each sibling is code in the kernel.
_MOST = 8


def join_siblings(schedule: Schedule, target: Target) -> Schedule:
    """Joins small independent contractions with an operand in common to `SiblingGroup`s.

    Each keeps its own epilogue and its own result buffer, so that layouts and fusion are the same
    as for products in kernels of their own. Those of one group are loaded and stored alike; others
    follow in kernels of their own.
    """
    clusters = Clusters(schedule, target)
    for key in (_same_lhs, _same_rhs):
        found: dict[Hashable, list[int]] = {}
        for k, group in enumerate(schedule.groups):
            if isinstance(group, AnchorGroup) and isinstance(group.anchor, Contraction):
                node = group.anchor
                if _is_small(node, target) and len(clusters.members[clusters.of[k]]) == 1:
                    found.setdefault((key(node), _in_common(node)), []).append(k)
        for candidates in found.values():
            _join_all(clusters, candidates)
    groups: list[KernelGroup] = []
    for members in clusters.in_order():
        groups += _as_groups([schedule.groups[m] for m in members], schedule.graph.buffers)
    return replace(schedule, groups=tuple(groups))


def _same_lhs(node: Contraction) -> Hashable:
    return node.lhs, node.rows


def _same_rhs(node: Contraction) -> Hashable:
    return node.rhs, node.columns


def _in_common(node: Contraction) -> Hashable:
    return node.batch, node.inner, node.lhs.dtype


def _is_small(node: Contraction, target: Target) -> bool:
    elements = typical_numel(product((*node.batch, *node.rows, *node.columns)))
    return not cost.fills_with_a_product(elements, target)


def _join_all(clusters: Clusters, candidates: Sequence[int]) -> None:
    """Joins groups to as few clusters as dependencies and bindings allow."""
    opened: list[int] = []
    for k in candidates:
        cluster = next((c for c in opened if _may_join(clusters, k, c)), None)
        if cluster is None:
            opened.append(k)
        else:
            clusters.join(k, cluster)


def _may_join(clusters: Clusters, k: int, cluster: int) -> bool:
    members = clusters.members[cluster]
    bound = reduce(or_, (clusters.buffers[m] for m in (*members, k)))
    return (
        len(members) < _MOST
        and clusters.bindings(bound) <= clusters.target.max_storage_buffers
        and clusters.independent(k, cluster)
    )


def _as_groups(
    groups: Sequence[KernelGroup], buffers: Mapping[str, Buffer]
) -> Sequence[KernelGroup]:
    if len(groups) == 1:
        return groups
    alike: dict[Hashable, list[AnchorGroup]] = {}
    for group in groups:
        assert isinstance(group, AnchorGroup)
        alike.setdefault(access_pattern(group, buffers), []).append(group)
    return [
        SiblingGroup(tuple(siblings)) if len(siblings) > 1 else siblings[0]
        for siblings in alike.values()
    ]
