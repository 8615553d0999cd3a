"""Epilogues: the maps and the store after a contraction or attention, in its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...ir.access import VECTOR, Lanes, is_multiple_of
from ...ir.anchors import store_is_vector
from ...ir.graph import Member
from ...symbolic.sizes import Expr, Symbol, iteration
from ..hardening.spelling import all_of
from ..values import Text
from .builder import KernelBuilder
from .pointwise import render_members


@dataclass(frozen=True, slots=True)
class Store:
    """The epilogue and store of one element of a result, or of four neighbouring columns."""

    lanes: int
    lines: list[str]
    guard: str


def points_along(
    name: str, size: Expr, point: Callable[[Expr], dict[Symbol, Expr]], vector: bool = True
) -> tuple[Lanes, Expr]:
    """Four neighbouring points of a dimension that those divide, else one; and where they end.

    Args:
        name: of the variable that says which four, or which one.
        point: of a position in the dimension.
        vector: whether there may be four.
    """
    if vector and is_multiple_of(size, VECTOR):
        quad = iteration(name, size // VECTOR)
        return [point(quad * VECTOR + x) for x in range(VECTOR)], size // VECTOR
    return [point(iteration(name, size))], size


def render_store(
    builder: KernelBuilder,
    members: Sequence[Member],
    output: str,
    along: tuple[str, Expr],
    point: Callable[[Expr], dict[Symbol, Expr]],
    limits: Mapping[str, Expr],
    within: str = "",
) -> Store:
    """How ``value`` is stored: four neighbours of a dimension where memory allows, else one.

    Args:
        output: of the anchor, whose value it is.
        along, point: see `points_along`.
        limits: of variables, besides that of the dimension.
        within: another condition, or "".
    """
    lanes, limit = points_along(*along, point)
    if not all(store_is_vector(builder.buffers, m, lanes) for m in members if m.store):
        lanes, limit = points_along(*along, point, vector=False)
    lines = render_epilogue(builder, members, {output: "value"}, lanes)
    ends = {**limits, along[0]: limit}
    guards = [f"{name} < {builder.index(end)}" for name, end in ends.items()]
    return Store(len(lanes), lines, all_of([within, *guards]))


def render_epilogue(
    builder: KernelBuilder, members: Sequence[Member], results: Mapping[str, str], lanes: Lanes
) -> list[str]:
    """Statements that turn the anchors' ``results`` (names in WGSL) into all stored members."""
    known = {
        output: Text(name, len(lanes), builder.buffers[output].dtype)
        for output, name in results.items()
    }
    return render_members(builder, members, lanes, known)
