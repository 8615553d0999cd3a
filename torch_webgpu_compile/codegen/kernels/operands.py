"""How contractions load tiles of their operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...ir.access import VECTOR, Lanes, flat_values, is_multiple_of
from ...ir.factors import before_cast, is_in_memory, is_zero
from ...ir.nodes import Contraction
from ...ir.scalar import Const, Load, Masked, Op, Scalar
from ...symbolic.sizes import (
    Expr,
    Symbol,
    ceildiv,
    iteration,
    product,
)
from ..values import Scope
from ..wgsl.literals import zero_of
from ..wgsl.scalars import Renderer
from .builder import KernelBuilder

_ZEROS = {"u32": "0u", "f16": "0h"}


@dataclass(frozen=True, slots=True)
class TileLoad:
    """How a tile of an operand is loaded; inputs of ``templates/matmul.wgsl.jinja``.

    Attributes:
        axis: along which dimension an invocation loads four neighbours: "inner", "outer" or
            neither.
        lines: WGSL statements that make ``result``.
        result: the WGSL expression of one element, or of the four.
        guards: below what m or n, and k, are to be for the element to exist, where they may not be.
        type: the WGSL type of the result.
        outside: the result where the element does not exist.
        run: with the axis "inner", fours of neighbours that one call loads: an array, if several.
    """

    axis: str
    lines: list[str]
    result: str
    guards: Mapping[str, str]
    type: str
    outside: str
    run: int = 1


def load_operand(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    outer: tuple[str, Sequence[Expr]],
    axis: str,
    tile: int,
    inner_tile: int,
    run: int = 1,
    element: str = "",
) -> TileLoad:
    """How a kernel loads an operand of a contraction: statements, and the condition to be inside.

    Args:
        body: an element of the operand, over the contraction's symbols.
        outer: the prefix (m or n) and the sizes of the operand's outer symbols.
        axis: see `TileLoad.axis`.
        tile, inner_tile: elements of a tile along the outer and the inner dimension.
        run: see `TileLoad.run`; k is the number of such an array. 1 for other axes.
        element: the WGSL type of an element; "" for that of the body; "bf16" for two words of two
            elements each, or one word that has the one element twice, of a cast of bfloat16.
    """
    prefix, outer_sizes = outer
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    environment = points_of(node, outer)
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
    is_packed = element == "bf16"
    if element in ("f16", "bf16"):
        body = _with_plain_zeros(body)
    lines, results = _render(builder, body, loads, is_packed)
    is_converted = not is_packed and element not in ("", body.dtype.compute)
    element = "u32" if is_packed else element or body.dtype.compute
    type = element
    if len(loads[0]) > 1:
        type = f"vec{VECTOR // 2 if is_packed else VECTOR}<{element}>"
    if is_converted:
        results = [f"{type}({result})" for result in results]
    zero = _ZEROS.get(element) or zero_of(body.dtype)
    outside = zero if type == element else f"{type}({zero})"
    result = results[0]
    if run > 1:
        type = f"array<{type}, {run}>"
        result, outside = f"{type}({', '.join(results)})", f"{type}()"
    are_whole = is_multiple_of(outer_count, tile), is_multiple_of(inner_count, inner_tile)
    guards = guards_of(builder, prefix, limits, are_whole)
    return TileLoad(axis, lines, result, guards, type, outside, run)


def points_of(
    node: Contraction, outer: tuple[str, Sequence[Expr]]
) -> Callable[[Expr, Expr], dict[Symbol, Expr]]:
    """The values of all symbols of an operand at flat outer and inner positions; see above."""
    batch = flat_values("b", node.batch, iteration("b", product(node.batch)))
    prefix, sizes = outer
    return lambda o, i: {
        **batch,
        **flat_values(prefix, sizes, o),
        **flat_values("k", node.inner, i),
    }


def guards_of(
    builder: KernelBuilder,
    prefix: str,
    limits: tuple[Expr, Expr],
    are_whole: tuple[bool, bool],
) -> dict[str, str]:
    """`TileLoad.guards`: the limits of m or n and of k, where tiles are not known to be below."""
    names = zip((prefix, "k"), limits, are_whole, strict=True)
    return {name: builder.index(limit) for name, limit, whole in names if not whole}


def _render(
    builder: KernelBuilder, body: Scalar, loads: Sequence[Lanes], packed: bool
) -> tuple[list[str], list[str]]:
    """Statements, and the value of each load; what several of them access at once is there once."""
    wide = Scope() if len(loads) > 1 else None
    lines, results = [], []
    for lanes in loads:
        own = Scope(parent=wide)
        renderer = builder.renderer(lanes, own, wide=wide)
        if packed:
            results.append(_packed(renderer, body, len(lanes)))
        else:
            results.append(renderer.render(body).widen(len(lanes)))
        if wide is not None:
            lines += wide.lines
            wide.lines = []
        lines += own.lines
    return lines, results


def _packed(renderer: Renderer, body: Scalar, lanes: int) -> str:
    """The words of a body that is a cast of bfloat16."""
    source = before_cast(body)
    found = renderer.packed(source) if isinstance(source, Load) else None
    if found is not None:
        return found
    value = renderer.render(source)
    # What was computed is not rounded yet.
    bits = "(bitcast<u32>({}) >> 16u)" if is_in_memory(source) else "bf16_bits({})"
    parts = [bits.format(value.lane(k)) for k in range(lanes)]
    if lanes == 1:
        return f"{parts[0]} * 0x10001u"
    words = (f"{low} | ({high} << 16u)" for low, high in zip(parts[::2], parts[1::2], strict=True))
    return f"vec2<u32>({', '.join(words)})"


def _with_plain_zeros(body: Scalar) -> Scalar:
    """The body with 0, not hidden from the driver, where it is 0 outside of a part.

    What travels through workgroup memory in halves needs no secret, which is an f32: it would make
    f32 of all elements.
    """
    match body:
        case Masked(condition, inside, other) if is_zero(other):
            return Masked(condition, _with_plain_zeros(inside), Const(0, body.dtype))
        case Op("cast", (inside,), dtype):
            return Op("cast", (_with_plain_zeros(inside),), dtype)
    return body
