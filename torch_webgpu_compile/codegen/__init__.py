"""Schedules to WGSL kernels."""

from __future__ import annotations

from ..ir.graph import AnchorGroup, Buffer, KernelGroup, MapGroup, RowGroup, Schedule
from ..ir.nodes import Attention, Contraction, HostCall
from ..plan.model import KernelCall
from ..sizes import ZERO, product
from ..target import Target
from .attention import generate_attention
from .contraction import generate_contraction
from .pointwise import generate_map
from .reduction import generate_rows
from .scatter import generate_scatter

__all__ = ["generate"]


def generate(schedule: Schedule, target: Target) -> tuple[KernelCall | HostCall, ...]:
    """The kernel calls (and host calls) of a schedule, in order."""
    calls: list[KernelCall | HostCall] = []
    for group in schedule.groups:
        calls += _generate_group(group, schedule.graph.buffers, target)
    return tuple(calls)


def _generate_group(
    group: KernelGroup, buffers: dict[str, Buffer], target: Target
) -> list[KernelCall | HostCall]:
    match group:
        case MapGroup():
            if product(group.ranges) is ZERO:
                return []
            return [generate_map(group, buffers, target)]
        case RowGroup():
            if product(group.rows) is ZERO:
                return []
            return [generate_rows(group, buffers, target)]
        case AnchorGroup(anchor=Contraction()):
            if buffers[group.anchor.output].numel is ZERO:
                return []
            return [generate_contraction(group, buffers, target)]
        case AnchorGroup(anchor=Attention()):
            if buffers[group.anchor.output].numel is ZERO:
                return []
            return [generate_attention(group, buffers, target)]
        case _:
            if isinstance(group.node, HostCall):
                return [group.node]
            return generate_scatter(group.node, buffers, target)
