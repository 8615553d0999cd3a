"""How contractions load tiles of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.nodes import Contraction
from ..ir.scalar import Index, Scalar, loads_of
from ..ir.spaces import iteration_symbols, symbol_keys
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    ceildiv,
    delinearize,
    iteration,
    linearize,
    product,
    substitute,
    symbols_of,
)
from .buffer_access import VECTOR
from .index_wgsl import are_aligned_neighbours, is_multiple_of
from .kernel import KernelBuilder
from .pointwise import Lanes
from .values import Scope


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


def flat_values(prefix: str, sizes: Sequence[Expr], flat: Expr) -> dict[Symbol, Expr]:
    """The values of ``prefix0, prefix1, …`` at flat position ``flat``."""
    symbols = symbol_keys(iteration_symbols(prefix, sizes))
    return dict(zip(symbols, delinearize(flat, sizes), strict=True))


def load_operand(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    axis: str,
    outer: tuple[str, Sequence[Expr]],
    tile: int,
    inner_tile: int,
) -> TileLoad:
    """How a kernel loads an operand of a contraction: statements, and the condition to be inside.

    Args:
        body: an element of the operand, over the contraction's symbols.
        axis: see `TileLoad.axis`.
        outer: the prefix (m or n) and the sizes of the operand's outer symbols.
        tile, inner_tile: elements of a tile along the outer and the inner dimension.
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

    lanes: Lanes
    if axis == "inner":
        o = iteration(prefix, outer_count)
        i = iteration("k", ceildiv(inner_count, VECTOR))
        lanes = [environment(o, i * VECTOR + x) for x in range(VECTOR)]
        limits = (outer_count, inner_count // VECTOR)
    elif axis == "outer":
        o = iteration(prefix, ceildiv(outer_count, VECTOR))
        i = iteration("k", inner_count)
        lanes = [environment(o * VECTOR + x, i) for x in range(VECTOR)]
        limits = (outer_count // VECTOR, inner_count)
    else:
        lanes = [environment(iteration(prefix, outer_count), iteration("k", inner_count))]
        limits = (outer_count, inner_count)
    scope = Scope()
    value = builder.renderer(lanes, scope).render(body)
    guards = []
    if not is_multiple_of(outer_count, tile):
        guards.append(f"{prefix} < {builder.index(limits[0])}")
    if not is_multiple_of(inner_count, inner_tile):
        guards.append(f"k < {builder.index(limits[1])}")
    return TileLoad(axis, scope.lines, value.widen(len(lanes)), " && ".join(guards))


def load_axes(builder: KernelBuilder, node: Contraction) -> tuple[str, str]:
    """How the tiles of lhs and rhs are loaded: `TileLoad.axis` of each."""
    return (
        _choose_axis(builder, node, node.lhs, "m", node.rows),
        _choose_axis(builder, node, node.rhs, "n", node.columns),
    )


def _choose_axis(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    prefix: str,
    outer_sizes: Sequence[Expr],
) -> str:
    """Which neighbours an invocation loads at once: along the inner or the outer dimension."""
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    steps = {}
    for axis, name, sizes, count in (
        ("inner", "k", node.inner, inner_count),
        ("outer", prefix, outer_sizes, outer_count),
    ):
        if is_multiple_of(count, VECTOR):
            flat = iteration("flat", count // VECTOR)
            lanes = [flat_values(name, sizes, flat * VECTOR + x) for x in range(VECTOR)]
            if _contiguous(builder, body, lanes):
                return axis
        first = flat_values(name, sizes, iteration("flat", count))
        steps[axis] = _smallest_step(builder, body, first)
    return "scalar_inner" if steps["inner"] <= steps["outer"] else "scalar_outer"


def _addresses(builder: KernelBuilder, body: Scalar) -> list[Expr]:
    """Addresses of the loads with the largest buffer: the operand itself, not masks or scales."""
    loads = [o for o in loads_of(body) if all(isinstance(i, Index) for i in o.index)]
    rank = max((len(o.index) for o in loads), default=0)
    found = []
    for load in loads:
        if len(load.index) == rank:
            buffer = builder.buffers[load.buffer]
            exprs = [i.expr for i in load.index if isinstance(i, Index)]
            found.append(linearize(exprs, buffer.strides) + buffer.offset)
    return found


def _contiguous(builder: KernelBuilder, body: Scalar, lanes: Lanes) -> bool:
    addresses = _addresses(builder, body)
    return bool(addresses) and all(
        are_aligned_neighbours([substitute(a, env) for env in lanes]) for a in addresses
    )


def _smallest_step(builder: KernelBuilder, body: Scalar, env: dict[Symbol, Expr]) -> int:
    """The distance in memory between two neighbours, 2³⁰ when unknown."""
    smallest = 1 << 30
    flat = next((s for e in env.values() for s in _flat_symbols(e)), None)
    if flat is None:
        return smallest
    for address in _addresses(builder, body):
        at = substitute(address, env)
        step = substitute(at, {flat: ONE}) - substitute(at, {flat: ZERO})
        if step.is_constant and step.constant:
            smallest = min(smallest, abs(step.constant))
    return smallest


def _flat_symbols(expr: Expr) -> list[Symbol]:
    return [s for s in symbols_of(expr) if s.name == "flat"]
