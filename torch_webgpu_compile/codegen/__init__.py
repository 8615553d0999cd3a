"""Schedules to WGSL kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import assert_never

from ..ir.attention_nodes import Attention, AttentionGradient
from ..ir.graph import (
    AnchorGroup,
    Buffer,
    ForeachGroup,
    JointGroup,
    KernelGroup,
    MapGroup,
    PairGroup,
    RowGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
)
from ..ir.nodes import Contraction, Fourier, HostCall, Scatter, TriangularSolve
from ..ir.renaming import form_of
from ..plan.model import KernelCall
from ..symbolic.sizes import ZERO, product
from ..target import Target
from .attention import generate_attention
from .attention_gradient import generate_attention_gradient
from .attention_parts import generate_attention_parts
from .contraction import Tilings, generate_contraction, kernels_of
from .foreach import generate_foreach
from .fourier import generate_fourier
from .joint import generate_joint
from .pointwise import generate_map
from .reduction import generate_rows
from .scatter import generate_scatter
from .transpose import find_transposition, generate_transpose
from .triangular import generate_triangular_solve

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
        form, names = form_of(group, buffers) or (None, ())
        if form in known:
            first, repeated = known[form]
            instead = dict(zip(first, names, strict=True))
            calls += [call.on(instead) for call in repeated]
            continue
        made = _generate_group(group, buffers, target, tilings)
        calls += made
        if form is not None:
            known[form] = names, [call for call in made if isinstance(call, KernelCall)]
    return tuple(calls)


def _generate_group(
    group: KernelGroup, buffers: dict[str, Buffer], target: Target, tilings: Tilings
) -> Sequence[KernelCall | HostCall]:
    match group:
        case MapGroup():
            return [] if product(group.ranges) is ZERO else [_map(group, buffers, target)]
        case ForeachGroup():
            return _foreach(group, buffers, target)
        case JointGroup():
            joint = generate_joint(group, buffers, target)
            if joint is not None:
                return [joint]
            calls = (_generate_group(part, buffers, target, tilings) for part in group.groups)
            return [call for part in calls for call in part]
        case RowGroup():
            empty = product(group.rows) is ZERO
            return [] if empty else [generate_rows(group, buffers, target)]
        case AnchorGroup():
            if buffers[group.anchor.output].numel is ZERO:
                return []
            if isinstance(group.anchor, Contraction):
                return [generate_contraction(group, buffers, target, tilings)]
            assert isinstance(group.anchor, Attention)
            if group.anchor.parts > 1:
                return [generate_attention_parts(group, buffers, target)]
            return [generate_attention(group, buffers, target)]
        case SiblingGroup() | PairGroup():
            return [
                generate_contraction(kernel, buffers, target, tilings)
                for kernel in kernels_of(group, buffers, target)
            ]
        case SingleGroup(node=AttentionGradient() as node):
            empty = buffers[node.output].numel is ZERO
            return [] if empty else [generate_attention_gradient(node, buffers, target)]
        case SingleGroup(node=TriangularSolve() as solve):
            empty = buffers[solve.output].numel is ZERO
            return [] if empty else [generate_triangular_solve(solve, buffers, target)]
        case SingleGroup(node=Fourier() as node):
            empty = buffers[node.output].numel is ZERO
            return [] if empty else [generate_fourier(node, buffers, target)]
        case SingleGroup(node=HostCall() as call):
            return [call]
        case SingleGroup(node=Scatter() as scatter):
            return generate_scatter(scatter, buffers, target)
        case _:
            assert_never(group)  # type: ignore[arg-type]


def _map(group: MapGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    found = find_transposition(group, buffers, target)
    if found is not None:
        return generate_transpose(group, found, buffers, target)
    return generate_map(group, buffers, target)


def _foreach(group: ForeachGroup, buffers: dict[str, Buffer], target: Target) -> list[KernelCall]:
    """One kernel, and one more for each map whose loads are better made by tiles."""
    tiled = [part for part in group.groups if find_transposition(part, buffers, target)]
    plain = tuple(part for part in group.groups if part not in tiled)
    if len(plain) > 1:
        return [
            generate_foreach(ForeachGroup(plain), buffers, target),
            *(_map(part, buffers, target) for part in tiled),
        ]
    return [_map(part, buffers, target) for part in group.groups]
