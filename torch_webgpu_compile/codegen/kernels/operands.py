"""How contractions load tiles of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.access import VECTOR, Lanes, flat_values, is_multiple_of
from ...ir.nodes import Contraction
from ...ir.scalar import Scalar
from ...symbolic.sizes import (
    Expr,
    Symbol,
    ceildiv,
    iteration,
    product,
)
from ..hardening.spelling import all_of
from ..values import Scope
from .builder import KernelBuilder


@dataclass(frozen=True, slots=True)
class TileLoad:
    """How a tile of an operand is loaded; inputs of ``templates/matmul.wgsl.jinja``.

    Attributes:
        axis: along which dimension an invocation loads four neighbours: "inner", "outer" or
            neither.
        lines: WGSL statements that make ``result``.
        result: the WGSL expression of one element, or of the four.
        guard: the condition under which the element exists, "" if that is always.
    """

    axis: str
    lines: list[str]
    result: str
    guard: str


def load_operand(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    axis: str,
    outer: tuple[str, Sequence[Expr]],
    tile: int,
    inner_tile: int,
    run: int = 1,
) -> TileLoad:
    """How a kernel loads an operand of a contraction: statements, and the condition to be inside.

    Args:
        body: an element of the operand, over the contraction's symbols.
        axis: see `TileLoad.axis`.
        outer: the prefix (m or n) and the sizes of the operand's outer symbols.
        tile, inner_tile: elements of a tile along the outer and the inner dimension.
        run: with the axis "inner", loads of four neighbours that are made together: the result is
            an array of them, and k their number.
    """
    prefix, outer_sizes = outer
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    batch = flat_values("b", node.batch, iteration("b", product(node.batch)))

    def environment(o: Expr, i: Expr) -> dict[Symbol, Expr]:
        return {
            **batch,
            **flat_values(prefix, outer_sizes, o),
            **flat_values("k", node.inner, i),
        }

    loads: list[Lanes]
    if axis == "inner":
        o = iteration(prefix, outer_count)
        i = iteration("k", ceildiv(inner_count, VECTOR * run)) * run
        loads = [[environment(o, (i + u) * VECTOR + x) for x in range(VECTOR)] for u in range(run)]
        limits = (outer_count, inner_count // (VECTOR * run))
    elif axis == "outer":
        o = iteration(prefix, ceildiv(outer_count, VECTOR))
        i = iteration("k", inner_count)
        loads = [[environment(o * VECTOR + x, i) for x in range(VECTOR)]]
        limits = (outer_count // VECTOR, inner_count)
    else:
        loads = [[environment(iteration(prefix, outer_count), iteration("k", inner_count))]]
        limits = (outer_count, inner_count)
    lines, results = _render(builder, body, loads)
    guards = []
    if not is_multiple_of(outer_count, tile):
        guards.append(f"{prefix} < {builder.index(limits[0])}")
    if not is_multiple_of(inner_count, inner_tile):
        guards.append(f"k < {builder.index(limits[1])}")
    result = results[0]
    if run > 1:
        result = f"array<vec4<{body.dtype.compute}>, {run}>({', '.join(results)})"
    return TileLoad(axis, lines, result, all_of(guards))


def _render(
    builder: KernelBuilder, body: Scalar, loads: Sequence[Lanes]
) -> tuple[list[str], list[str]]:
    """Statements, and the value of each load; what several of them access at once is there once."""
    wide = Scope() if len(loads) > 1 else None
    lines, results = [], []
    for lanes in loads:
        own = Scope(parent=wide)
        value = builder.renderer(lanes, own, wide=wide).render(body)
        results.append(value.widen(len(lanes)))
        if wide is not None:
            lines += wide.lines
            wide.lines = []
        lines += own.lines
    return lines, results
