"""Schedules to WGSL kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import assert_never

from ..ir.anchors import are_contractions
from ..ir.attention_nodes import Attention, AttentionGradient
from ..ir.buffers import Buffer
from ..ir.depthwise_nodes import DepthwiseConvolution, DepthwiseWeightGradient
from ..ir.graph import (
    AnchorGroup,
    ForeachGroup,
    JointGroup,
    KernelGroup,
    MapGroup,
    RowGroup,
    Schedule,
    SingleGroup,
    dispatch_count,
)
from ..ir.nodes import Factorization, Fourier, HostCall, Scan, Scatter, TriangularSolve, UserKernel
from ..ir.renaming import group_key
from ..ir.sorting_nodes import Compact, DigitCounts, DigitScatter, PartSums, PickDigit, RowSort
from ..ir.transposition import find_transposition
from ..plan.model import KernelCall
from ..target import Target
from .kernels.attention import generate_attention
from .kernels.attention_gradient import generate_attention_gradient
from .kernels.attention_parts import generate_attention_parts
from .kernels.contraction import Tilings, generate_contraction, has_shifts
from .kernels.depthwise import generate_depthwise, generate_depthwise_weight_gradient
from .kernels.factorization import generate_factorization
from .kernels.foreach import generate_foreach
from .kernels.fourier import generate_fourier
from .kernels.joint import generate_joint
from .kernels.pointwise import generate_map
from .kernels.reduction import generate_rows
from .kernels.scan import generate_scan
from .kernels.scatter import generate_scatter
from .kernels.selection import generate_compact, generate_pick_digit
from .kernels.sorting import (
    generate_digit_counts,
    generate_digit_scatter,
    generate_part_sums,
    generate_row_sort,
)
from .kernels.transpose import generate_transpose
from .kernels.triangular import generate_triangular_solve
from .kernels.user_kernel import generate_user_kernel

__all__ = ["generate"]


def generate(
    schedule: Schedule, target: Target, tilings: Tilings
) -> tuple[KernelCall | HostCall, ...]:
    """The kernel calls (and host calls) of a schedule, in order.

    Models repeat their layers: groups that differ in their buffers only are generated once.
    """
    calls: list[KernelCall | HostCall] = []
    known: dict[Hashable, tuple[tuple[str, ...], list[KernelCall]]] = {}
    buffers = schedule.graph.buffers
    for group in schedule.groups:
        key, names = group_key(group, buffers) or (None, ())
        if key in known:
            first, repeated = known[key]
            instead = dict(zip(first, names, strict=True))
            calls += [call.on(instead) for call in repeated]
            continue
        made = _generate_group(group, buffers, target, tilings)
        kernels = [call for call in made if isinstance(call, KernelCall)]
        assert _is_count(len(kernels), group, buffers), group
        calls += made
        if key is not None:
            known[key] = names, kernels
    return tuple(calls)


def _is_count(kernels: int, group: KernelGroup, buffers: dict[str, Buffer]) -> bool:
    """Whether so many kernels are made of a group; one more of products with shifts."""
    more = kernels - dispatch_count(group, buffers)
    return more in (0, int(are_contractions(group) and has_shifts(group)))


def _generate_group(
    group: KernelGroup, buffers: dict[str, Buffer], target: Target, tilings: Tilings
) -> Sequence[KernelCall | HostCall]:
    """One call of a group, or as many as `dispatch_count` says."""
    if isinstance(group, SingleGroup) and isinstance(group.node, HostCall):
        return [group.node]
    if isinstance(group, SingleGroup) and isinstance(group.node, Scatter):
        return generate_scatter(group.node, buffers, target)
    if not dispatch_count(group, buffers):
        return []
    if are_contractions(group):
        return generate_contraction(group, buffers, target, tilings)
    return [_generate_kernel(group, buffers, target)]


def _generate_kernel(group: KernelGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    match group:
        case MapGroup():
            found = find_transposition(group, buffers, target)
            if found is not None:
                return generate_transpose(group, found, buffers, target)
            return generate_map(group, buffers, target)
        case ForeachGroup():
            return generate_foreach(group, buffers, target)
        case JointGroup():
            return generate_joint(group, buffers, target)
        case RowGroup():
            return generate_rows(group, buffers, target)
        case AnchorGroup(anchor=Attention() as node):
            if node.parts > 1:
                return generate_attention_parts(group, buffers, target)
            return generate_attention(group, buffers, target)
        case AnchorGroup(anchor=DepthwiseConvolution()):
            return generate_depthwise(group, buffers, target)
        case AnchorGroup(anchor=DepthwiseWeightGradient()):
            return generate_depthwise_weight_gradient(group, buffers, target)
        case SingleGroup(node=AttentionGradient() as node):
            return generate_attention_gradient(node, buffers, target)
        case SingleGroup(node=TriangularSolve() as node):
            return generate_triangular_solve(node, buffers, target)
        case SingleGroup(node=Factorization() as node):
            return generate_factorization(node, buffers, target)
        case SingleGroup(node=Scan() as node):
            return generate_scan(node, buffers, target)
        case SingleGroup(node=RowSort() as node):
            return generate_row_sort(node, buffers, target)
        case SingleGroup(node=DigitCounts() as node):
            return generate_digit_counts(node, buffers, target)
        case SingleGroup(node=PartSums() as node):
            return generate_part_sums(node, buffers, target)
        case SingleGroup(node=DigitScatter() as node):
            return generate_digit_scatter(node, buffers, target)
        case SingleGroup(node=PickDigit() as node):
            return generate_pick_digit(node, buffers, target)
        case SingleGroup(node=Compact() as node):
            return generate_compact(node, buffers, target)
        case SingleGroup(node=Fourier() as node):
            return generate_fourier(node, buffers, target)
        case SingleGroup(node=UserKernel() as node):
            return generate_user_kernel(node, buffers, target)
        case _:
            assert_never(group)  # type: ignore[arg-type]
