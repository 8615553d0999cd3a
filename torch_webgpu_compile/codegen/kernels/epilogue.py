"""Epilogues: the maps and the store after a contraction or attention, in its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...ir.access import Lanes
from ...ir.graph import Member
from ..values import Text
from .builder import KernelBuilder
from .pointwise import render_members


@dataclass(frozen=True, slots=True)
class Store:
    """The epilogue and store of one element of a result, or of four neighbouring columns."""

    lanes: int
    lines: list[str]
    guard: str


def render_epilogue(
    builder: KernelBuilder, members: Sequence[Member], results: Mapping[str, str], lanes: Lanes
) -> list[str]:
    """Statements that turn the anchors' ``results`` (names in WGSL) into all stored members."""
    known = {
        output: Text(name, len(lanes), builder.buffers[output].dtype)
        for output, name in results.items()
    }
    return render_members(builder, members, lanes, known)
