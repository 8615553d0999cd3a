"""What happens to the result of a contraction or of attention before it is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..ir.graph import AnchorGroup, Member
from ..ir.scalar import Index, Load, Scalar
from .index_wgsl import are_aligned_neighbours
from .kernel import KernelBuilder, lane_addresses
from .pointwise import Lanes, render_members
from .values import Text


@dataclass(frozen=True, slots=True)
class Store:
    """What happens to an element, or four neighbouring columns, of a result."""

    lanes: int
    lines: list[str]
    guard: str


def anchor_members(groups: Iterable[AnchorGroup], builder: KernelBuilder) -> list[Member]:
    """The epilogues of groups, each led by the anchor's own result when that is stored."""
    members: list[Member] = []
    for group in groups:
        if group.store_anchor:
            output, index = group.anchor.output, group.anchor.result_index
            dtype = builder.buffers[output].dtype
            load: Scalar = Load(output, tuple(Index(i) for i in index), dtype)
            members.append(Member(output, load, index, True))
        members += group.epilogue
    return members


def render_epilogue(
    builder: KernelBuilder, members: Sequence[Member], results: Mapping[str, str], lanes: Lanes
) -> list[str]:
    """Statements that turn the anchors' ``results`` (names in WGSL) into all stored members."""
    known = {
        output: Text(name, len(lanes), builder.buffers[output].dtype)
        for output, name in results.items()
    }
    return render_members(builder, members, lanes, known)


def store_is_vector(builder: KernelBuilder, member: Member, lanes: Lanes) -> bool:
    """Whether the lanes of a store are four aligned neighbours in memory."""
    buffer = builder.buffers[member.output]
    return are_aligned_neighbours(lane_addresses(buffer, member.index, lanes))
