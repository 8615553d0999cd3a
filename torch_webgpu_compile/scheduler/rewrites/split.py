"""Splitting what is too small to fill a GPU: partial results, then theirs.

Reductions of few, long rows, and contractions of small results over a long inner dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ...dtypes import DType
from ...ir.access import flat_values, neighbours_in_rows, typical_numel
from ...ir.buffers import Buffer, intermediate
from ...ir.depthwise_access import gradient_has_neighbours
from ...ir.depthwise_nodes import DepthwiseWeightGradient
from ...ir.graph import LoopGraph
from ...ir.nodes import Contraction, Pointwise, Reduction, inputs_of
from ...ir.scalar import (
    Load,
    Masked,
    Scalar,
    apply,
    cast,
    const,
    index,
    neutral,
    substitute_symbols,
)
from ...ir.spaces import Node, iteration_symbols, numbered, symbol_keys
from ...symbolic.sizes import ZERO, Expr, Symbol, as_expr, ceildiv, iteration, product, substitute
from ...target import Target
from .. import cost
from ..mapping import point_of
from .long_positions import POSITIONS, split_position

SPLITTABLE = frozenset({"sum", "prod", "minimum", "maximum", "any", "all"})

# Where a driver ends loops after so many iterations: of them, one reduction's share in a kernel of
# several; elements per iteration of the invocations that share a row, and of those of a column.
_LOOP_SHARE, _ROW_STEP, _COLUMN_STEP = 8, 1024, 4
# Elements of an inner dimension per iteration, those of the loop inside of a tile included.
_INNER_STEP = 2
# Positions that an iteration of a depthwise weight's gradient goes through, at least.
_TAP_STEP = 8
_VECTOR = 4  # parts are whole vectors of four


def split_reductions(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which long reductions of few rows are two: of parts, then of their results.

    So are reductions that take more iterations than the driver allows a loop.
    """

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        parts = _parts(node, graph, target) if isinstance(node, Reduction) else 1
        if not isinstance(node, Reduction) or parts == 1:
            return None
        split = split_position if node.kind in POSITIONS else _split
        return split(node, parts, buffers)

    return graph.expanded(parts_of)


def _parts(node: Reduction, graph: LoopGraph, target: Target) -> int:
    if not product(node.reduce_ranges).is_constant:
        return 1
    useful = _useful_parts(node, graph, target) if node.kind in SPLITTABLE else 1
    return max(useful, _needed_parts(node, graph, target))


def _needed_parts(node: Reduction, graph: LoopGraph, target: Target) -> int:
    """Parts that the driver's limit for loops asks for."""
    if not target.max_loop_iterations:
        return 1
    step = _COLUMN_STEP if _columns(node, graph) else _ROW_STEP
    most = max(1, target.max_loop_iterations // _LOOP_SHARE) * step
    return -(-int(product(node.reduce_ranges)) // most)


def _useful_parts(node: Reduction, graph: LoopGraph, target: Target) -> int:
    """Parts that fill a GPU."""
    rows, length = product(node.ranges), product(node.reduce_ranges)
    if not rows.is_constant:
        return 1
    if int(rows) == 0:
        return 1
    useful = cost.column_parts if _columns(node, graph) else cost.row_parts
    return useful(int(rows), int(length), target)


def _columns(node: Reduction, graph: LoopGraph) -> bool:
    """Whether neighbouring rows, not neighbouring elements of a row, are neighbours in memory."""
    rows = numbered("i", node.ranges)
    elements = numbered("r", node.reduce_ranges)
    return not neighbours_in_rows([node.body], graph.buffers, rows, elements)


def _split(node: Reduction, parts: int, buffers: dict[str, Buffer]) -> list[Node]:
    length = product(node.reduce_ranges)
    chunk = ceildiv(ceildiv(length, parts), 4) * 4
    parts = int(ceildiv(length, chunk))
    name = f"{node.output}_parts"
    result = buffers[node.output]
    sizes = (as_expr(parts), *node.ranges)
    buffers[name] = intermediate(name, node.body.dtype, sizes)
    new = iteration_symbols("i", sizes)
    old = numbered("i", node.ranges)
    (r,) = iteration_symbols("r", (chunk,))
    position = new[0] * chunk + r
    within = iteration("position", length)
    inner = flat_values("r", node.reduce_ranges, within)
    moved = substitute_symbols(node.body, {**dict(zip(old, new[1:], strict=True)), **inner})
    body = substitute_symbols(moved, {symbol_keys((within,))[0]: position})
    if length % chunk is not ZERO:
        inside = apply("lt", index(position), index(length))
        body = Masked(inside, body, neutral(node.kind, node.body.dtype))
    first = replace(node, output=name, ranges=sizes, reduce_ranges=(chunk,), body=body)
    (part,) = iteration_symbols("r", (parts,))
    rows = iteration_symbols("i", node.ranges)
    again: Scalar = Load(name, (index(part), *(index(i) for i in rows)), node.body.dtype)
    own = node.origins[-1:]  # those before it are of what the first part computes inline
    second = replace(node, reduce_ranges=(as_expr(parts),), body=again, origins=own)
    assert result.dtype is node.body.dtype or node.kind in SPLITTABLE
    return [first, second]


def split_weight_gradients(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which gradients of depthwise weights that would not fill the GPU are in parts.

    Those that take more iterations than the driver allows a loop are, too. A pointwise node adds
    their results.
    """

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, DepthwiseWeightGradient) or not node.channels.is_constant:
            return None
        positions = typical_numel(product((node.images, *node.positions)))
        useful = 1  # few cores are full soon
        if not target.software:
            neighbours = gradient_has_neighbours(node, buffers)
            useful = cost.tap_parts(int(node.channels), positions, neighbours, target)
        most = target.max_loop_iterations * _TAP_STEP
        needed = -(-positions // most) if most else 1
        parts = max(useful, needed)
        return None if parts <= 1 else _in_tap_parts(node, parts, buffers)

    return graph.expanded(parts_of)


def _in_tap_parts(
    node: DepthwiseWeightGradient, parts: int, buffers: dict[str, Buffer]
) -> list[Node]:
    name = f"{node.output}_parts"
    result = buffers[node.output]
    buffers[name] = intermediate(name, node.image.dtype, (as_expr(parts), *result.sizes))
    index = (*iteration_symbols("p", (parts,)), *node.index)
    first = replace(node, output=name, parts=parts, index=index)
    total = _sum_of_parts(name, parts, result.sizes, node.image.dtype)
    return [first, Pointwise(node.output, result.sizes, cast(total, result.dtype), node.origins)]


def _sum_of_parts(name: str, parts: int, sizes: Sequence[Expr], dtype: DType) -> Scalar:
    at = point_of(numbered("i", sizes))
    total: Scalar | None = None
    for part in range(parts):
        value = Load(name, (index(as_expr(part)), *(index(i) for i in at)), dtype)
        total = value if total is None else apply("add", total, value)
    assert total is not None
    return total


def split_contractions(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which contractions that would not fill the GPU are batches of shorter ones.

    Their results are added by a pointwise node, which what follows can join.
    """
    graph = split_long_contractions(graph, target)
    if target.software:  # few cores are full soon
        return graph
    # Products of one operand share a dispatch (see `join_siblings`) and fill a GPU together.
    tiles = Counter[tuple[str, Scalar]]()
    for node in graph.nodes:
        if isinstance(node, Contraction):
            tiles.update(dict.fromkeys(_shared(node), _tiles(node, target)))
    reduced = _reduced(graph)

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, Contraction):
            return None
        together = max(tiles[key] for key in _shared(node))
        found = _inner_parts(node, together, node.output in reduced, target)
        return None if found is None else _split_contraction(node, *found, buffers)

    return graph.expanded(parts_of)


def _reduced(graph: LoopGraph) -> set[str]:
    """Buffers that reductions read, directly or through pointwise nodes."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if isinstance(node, Reduction) or (isinstance(node, Pointwise) and node.output in found):
            found.update(inputs_of(node))
    return found


def _shared(node: Contraction) -> tuple[tuple[str, Scalar], ...]:
    return ("lhs", node.lhs), ("rhs", node.rhs)


def _tiles(node: Contraction, target: Target) -> int:
    """Workgroups of the largest tile; more than enough where a call decides."""
    batch, rows, columns = (product(s) for s in (node.batch, node.rows, node.columns))
    if not all(size.is_constant for size in (batch, rows, columns)):
        return cost.filling_workgroups(target)
    return cost.product_workgroups(int(batch), int(rows), int(columns))


def _inner_parts(
    node: Contraction, tiles: int, reduced: bool, target: Target
) -> tuple[int, int] | None:
    """The inner dimension to divide, and into how many parts; None where that does not pay.

    ``tiles``: of all products that share its dispatch. ``reduced``: whether the sum of the parts
    has a kernel to join.
    """
    rows, columns, inner = (product(s) for s in (node.rows, node.columns, node.inner))
    if tiles >= cost.filling_workgroups(target) or not all(s.is_constant for s in node.inner):
        return None
    most = cost.most_inner_parts(int(rows), int(columns), int(inner), tiles, reduced, target)
    for parts in range(most, 1, -1):
        for dim, size in enumerate(node.inner):
            if int(size) % (4 * parts) == 0 or (len(node.inner) > 1 and int(size) % parts == 0):
                return dim, parts
    return None


def _split_contraction(
    node: Contraction, dim: int, parts: int, buffers: dict[str, Buffer]
) -> list[Node]:
    name = f"{node.output}_parts"
    result = buffers[node.output]
    sizes = (as_expr(parts), *result.sizes)
    buffers[name] = _parts_buffer(name, result, sizes)
    batch = (as_expr(parts), *node.batch)
    inner = list(node.inner)
    inner[dim] = inner[dim] // parts
    b, k = iteration_symbols("b", batch), iteration_symbols("k", inner)
    moved: dict[Symbol, Expr] = dict(zip(numbered("b", node.batch), b[1:], strict=True))
    moved.update(zip(numbered("k", node.inner), k, strict=True))
    moved[numbered("k", node.inner)[dim]] = b[0] * inner[dim] + k[dim]
    first = replace(
        node,
        output=name,
        batch=batch,
        inner=tuple(inner),
        lhs=substitute_symbols(node.lhs, moved),
        rhs=substitute_symbols(node.rhs, moved),
        index=(b[0], *(substitute(i, moved) for i in node.index)),
    )
    total = _sum_of_parts(name, parts, result.sizes, result.dtype)
    return [first, Pointwise(node.output, result.sizes, total, node.origins)]


def _parts_buffer(name: str, result: Buffer, sizes: tuple[Expr, ...]) -> Buffer:
    """Of parts of a result, each in the result's own order."""
    return intermediate(name, result.dtype, sizes, (result.span, *result.strides))


def split_long_contractions(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which no contraction takes more iterations than the driver allows a loop.

    Longer ones become a batch of parts, whose results are added.
    """
    if not target.max_loop_iterations:
        return graph
    most = target.max_loop_iterations * _INNER_STEP // _VECTOR * _VECTOR

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        inner = product(node.inner) if isinstance(node, Contraction) else ZERO
        if isinstance(node, Contraction) and inner.is_constant and int(inner) > most:
            return _in_parts(node, int(inner), most, buffers)
        return None

    return graph.expanded(parts_of)


def _in_parts(node: Contraction, inner: int, most: int, buffers: dict[str, Buffer]) -> list[Node]:
    """Parts of at most ``most`` elements of the inner dimensions, which need not divide them."""
    parts = -(-inner // most)
    chunk = -(-inner // (parts * _VECTOR)) * _VECTOR
    name, result = f"{node.output}_parts", buffers[node.output]
    sizes = (as_expr(parts), *result.sizes)
    buffers[name] = _parts_buffer(name, result, sizes)
    batch = (as_expr(parts), *node.batch)
    b, (k,) = iteration_symbols("b", batch), iteration_symbols("k", (as_expr(chunk),))
    moved: dict[Symbol, Expr] = dict(zip(numbered("b", node.batch), b[1:], strict=True))
    position = b[0] * chunk + k
    within = iteration("position", inner)
    placed = flat_values("k", node.inner, within)

    def part_of(body: Scalar) -> Scalar:
        own = substitute_symbols(body, {**moved, **placed})
        own = substitute_symbols(own, {symbol_keys((within,))[0]: position})
        if inner % chunk == 0:
            return own
        inside = apply("lt", index(position), index(as_expr(inner)))
        return Masked(inside, own, const(0, own.dtype))

    first = replace(
        node,
        output=name,
        batch=batch,
        inner=(as_expr(chunk),),
        lhs=part_of(node.lhs),
        rhs=part_of(node.rhs),
        index=(b[0], *(substitute(i, moved) for i in node.index)),
    )
    (part,) = iteration_symbols("r", (as_expr(parts),))
    at = point_of(numbered("i", result.sizes))
    load = Load(name, (index(part), *(index(i) for i in at)), result.dtype)
    total = Reduction(node.output, result.sizes, (as_expr(parts),), "sum", load, node.origins)
    return [first, total]
