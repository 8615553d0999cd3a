"""Splits work that is too small to fill a GPU: partial results, then their combination.

Reductions of few, long rows, and contractions of small results over a long inner dimension.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce

from ...ir.access import flat_values, neighbours_in_rows
from ...ir.buffers import Buffer, intermediate
from ...ir.depthwise_access import gradient_has_neighbours
from ...ir.depthwise_nodes import DepthwiseWeightGradient
from ...ir.factors import units_config
from ...ir.graph import LoopGraph
from ...ir.nodes import Contraction, Pointwise, Reduction, inputs_of
from ...ir.rows import power_of
from ...ir.scalar import (
    Load,
    Masked,
    Op,
    Scalar,
    apply,
    cast,
    const,
    index,
    neutral,
    scalar_symbols,
    substitute_symbols,
)
from ...ir.spaces import Node, iteration_symbols, numbered, symbol_keys
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    as_expr,
    ceildiv,
    delinearize,
    floordiv,
    iteration,
    magnitude,
    magnitudes,
    product,
    substitute,
    typical,
)
from ...target import Target
from .. import cost
from ..mapping import point_of
from .inline import body_cost
from .long_positions import POSITIONS, split_position

# Where a driver ends loops after so many iterations: of them, one reduction's share in a kernel of
# several; elements per iteration of the invocations that share a row, and of those of a column.
_LOOP_SHARE, _ROW_STEP, _COLUMN_STEP = 8, 1024, 8
# Elements of an inner dimension per iteration, those of the loop inside of a tile included.
_INNER_STEP = 2
# Positions that an iteration of a depthwise weight's gradient goes through, at least.
_TAP_STEP = 8
_VECTOR = 4  # parts are whole vectors of four
# Elements of the inner dimension that most tiles take at a time, and all in matrix units: where
# parts are not multiples of them, each load asks whether it is inside.
_PART_STEP, _PART_STEP_IN_UNITS = 16, 64
_TILE = 64  # rows and columns of a tile
_LARGEST = (2 - 2**-23) * 2.0**127  # float32
_MOST_ADDED = 8  # parts whose sum is one expression, which joins what reads it


def split_reductions(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which long reductions of few rows are two: of parts, then of their results.

    So are reductions that take more iterations than the driver allows a loop.
    """

    sums = _sums_of_powers(graph)
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if isinstance(node, Reduction):
            useful, needed = _useful_parts(node, graph, target), _needed_parts(node, graph, target)
            counts[node.output] = max(useful, needed)
    for name, largest in sums.items():
        counts[name] = counts[largest.output] = max(counts[name], counts[largest.output])

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, Reduction) or counts[node.output] == 1:
            return None
        if node.output in sums:
            return _split_powers(node, sums[node.output], counts[node.output], buffers)
        split = split_position if node.kind in POSITIONS else _split
        return split(node, counts[node.output], buffers)

    return graph.expanded(parts_of)


def _sums_of_powers(graph: LoopGraph) -> dict[str, Reduction]:
    """The row's maximum of each sum of exp(v − shift) over a row, by the name of the sum.

    They are the denominators of softmax, log-softmax and logsumexp.
    """
    maxima: dict[object, Reduction] = {}
    found = {}
    for node in graph.nodes:
        if not isinstance(node, Reduction) or node.body.dtype.compute != "f32":
            continue
        if node.kind == "maximum":
            maxima[node.ranges, node.reduce_ranges, node.body] = node
        elif node.kind == "sum" and (power := _power(node)) is not None:
            largest = maxima.pop((node.ranges, node.reduce_ranges, power[0]), None)
            if largest is not None:
                found[node.output] = largest
    return found


def _power(node: Reduction) -> tuple[Scalar, Scalar] | None:
    """(v, shift) where a sum's body is exp(v − shift), of which the shift is one for a row."""
    power = power_of(node.body)
    elements = numbered("r", node.reduce_ranges)
    return power if power and scalar_symbols(power[1]).isdisjoint(elements) else None


def _split_powers(
    node: Reduction, largest: Reduction, parts: int, buffers: dict[str, Buffer]
) -> list[Node]:
    """A sum of exp(v − shift) in parts, each of them shifted by its own largest v.

    So a part does not wait for the largest of all. One without numbers is shifted by a number: it
    adds 0. Infinities stay what they are.
    """
    assert isinstance(node.body, Op)
    power = _power(node)
    assert power is not None
    (own, _), (first, second) = (
        _split(each, parts, dict(buffers) if each is largest else buffers)
        for each in (largest, node)
    )
    assert isinstance(own, Reduction)
    assert isinstance(first, Reduction)
    assert isinstance(second, Reduction)
    name, dtype = node.body.name, node.body.dtype

    def shift_of(part: Expr, rows: Sequence[Expr]) -> Scalar:
        at = (index(part), *(index(i) for i in rows))
        some = apply("maximum", Load(own.output, at, dtype), const(-_LARGEST, dtype))
        return apply("minimum", some, const(_LARGEST, dtype))

    def raised(exponent: Scalar) -> Scalar:
        return apply(name, exponent)

    part, *rows = iteration_symbols("i", first.ranges)
    inner = raised(apply("sub", own.body, shift_of(part, rows)))
    (r,) = iteration_symbols("r", second.reduce_ranges)
    change = apply("sub", shift_of(r, iteration_symbols("i", node.ranges)), power[1])
    total = apply("mul", second.body, raised(change))
    return [replace(first, body=inner), replace(second, body=total)]


def _needed_parts(node: Reduction, graph: LoopGraph, target: Target) -> int:
    """Parts that the driver's limit for loops asks for."""
    if not target.max_loop_iterations:
        return 1
    step = _COLUMN_STEP if _columns(node, graph) else _ROW_STEP
    most = max(1, target.max_loop_iterations // _LOOP_SHARE) * step
    length = product(node.reduce_ranges)
    return -(-int(length) // most) if length.is_constant else 1  # a call finds out


def _useful_parts(node: Reduction, graph: LoopGraph, target: Target) -> int:
    """Parts that fill a GPU."""
    rows, length = (magnitude(product(sizes)) for sizes in (node.ranges, node.reduce_ranges))
    if not rows or length is None:
        return 1
    if _columns(node, graph):
        return cost.column_parts(rows, length, target)
    # Other sums of arithmetic often have statistics of the row before them, in the same kernel.
    alone = node.kind in POSITIONS or _power(node) is not None
    operations = body_cost(node.body) if alone else 0
    return cost.row_parts(rows, length, target, operations)


def _columns(node: Reduction, graph: LoopGraph) -> bool:
    """Whether neighbouring rows, not neighbouring elements of a row, are neighbours in memory."""
    rows = numbered("i", node.ranges)
    elements = numbered("r", node.reduce_ranges)
    return not neighbours_in_rows([node.body], graph.buffers, rows, elements)


def _split(node: Reduction, parts: int, buffers: dict[str, Buffer]) -> list[Node]:
    length = product(node.reduce_ranges)
    chunk = ceildiv(ceildiv(length, parts), 4) * 4
    parts = int(ceildiv(length, chunk)) if length.is_constant else parts
    name = f"{node.output}_parts"
    sizes = (as_expr(parts), *node.ranges)
    buffers[name] = intermediate(name, node.body.dtype, sizes)
    new, (r,) = iteration_symbols("i", sizes), iteration_symbols("r", (chunk,))
    moved = dict(zip(numbered("i", node.ranges), new[1:], strict=True))
    missing = neutral(node.kind, node.body.dtype)
    position = new[0] * chunk + r
    body = _part_of(node.body, moved, ("r", node.reduce_ranges), position, chunk, missing)
    first = replace(node, output=name, ranges=sizes, reduce_ranges=(chunk,), body=body)
    (part,) = iteration_symbols("r", (parts,))
    rows = iteration_symbols("i", node.ranges)
    again: Scalar = Load(name, (index(part), *(index(i) for i in rows)), node.body.dtype)
    own = node.origins[-1:]  # those before it are of what the first part computes inline
    second = replace(node, reduce_ranges=(as_expr(parts),), body=again, origins=own)
    return [first, second]


def _part_of(
    body: Scalar,
    moved: Mapping[Symbol, Expr],
    inner: tuple[str, tuple[Expr, ...]],
    position: Expr,
    chunk: Expr,
    missing: Scalar,
) -> Scalar:
    """A body at a row-major position of inner dimensions, which parts of ``chunk`` need not divide.

    ``moved`` are its other symbols, ``missing`` is what stands behind the last position.
    """
    length = product(inner[1])
    within = iteration("position", length)
    own = substitute_symbols(body, {**moved, **flat_values(*inner, within)})
    own = substitute_symbols(own, {symbol_keys((within,))[0]: position})
    if length % chunk is ZERO:
        return own
    # Parts are whole vectors: of those of all, four neighbours are inside together.
    unit = _VECTOR if length.divisor % _VECTOR == 0 else 1
    inside = apply("lt", index(position // unit), index(length // unit))
    return Masked(inside, own, missing)


def split_weight_gradients(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which gradients of depthwise weights that would not fill the GPU are in parts.

    Those that take more iterations than the driver allows a loop are, too. A pointwise node adds
    their results.
    """

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        if not isinstance(node, DepthwiseWeightGradient) or not node.channels.is_constant:
            return None
        positions = typical(product((node.images, *node.positions)))
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
    return [first, *_sum_of_parts(name, as_expr(parts), node, buffers)]


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
        in_units = units_config([node], target) is not None
        found = _inner_parts(node, together, node.output in reduced, in_units, target)
        if isinstance(found, int):
            step = _PART_STEP_IN_UNITS if in_units else _PART_STEP
            is_asked = _is_sum_of_images(node) and not in_units
            parts = _asked_parts(node, target) if is_asked else as_expr(found)
            return _in_parts(node, parts, step, buffers)
        return None if found is None else _split_contraction(node, found, buffers)

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
    sizes = magnitudes(batch, rows, columns)
    if sizes is None:
        return cost.filling_workgroups(target)
    in_units = units_config([node], target) is not None
    return cost.product_workgroups(*sizes, in_units=in_units)


def _inner_parts(
    node: Contraction, tiles: int, reduced: bool, in_units: bool, target: Target
) -> Sequence[int] | int | None:
    """How the inner dimensions are divided; None where that does not pay.

    Args:
        tiles: of all products that share its dispatch.
        reduced: whether the sum of the parts has a kernel to join.
        in_units: whether matrix units compute it.

    Returns:
        The parts of each inner dimension; or, of a single one that they do not divide, their
        number.
    """
    batch, rows, columns, inner = (
        product(s) for s in (node.batch, node.rows, node.columns, node.inner)
    )
    is_full = tiles >= cost.filling_workgroups(target, in_units=in_units)
    known = magnitudes(batch, rows, columns, inner)
    if is_full or known is None:
        return None
    sizes = known[0], known[1], known[2], known[3]
    best: Sequence[int] | int | None = None
    least = math.inf
    for parts in cost.inner_part_counts(*sizes[1:], target, in_units=in_units):
        divided = _divisors(node.inner, parts)
        if divided is None and len(node.inner) > 1 and inner.is_constant:
            continue  # others nearby divide them
        joined = reduced and parts <= _MOST_ADDED
        masked = divided is None
        nbytes = cost.parts_nbytes(
            sizes, parts, tiles, target, joined=joined, masked=masked, in_units=in_units
        )
        if nbytes < least:
            best, least = (parts if divided is None else divided) if parts > 1 else None, nbytes
    return best


def _is_sum_of_images(node: Contraction) -> bool:
    """Whether a call decides how many images, and positions of each, a contraction sums."""
    return sum(not size.is_constant for size in node.inner) > 1


def _asked_parts(node: Contraction, target: Target) -> Expr:
    """Parts of a sum over images, as many as fill the GPU with what the call asks for.

    Its class tells that to a few powers of two only, which is too little for a small result: too
    few parts leave multiprocessors idle, and each part too many is written and read. Workgroups
    that gather pixels wait for memory, so that twice as many as else are faster: 561 µs instead of
    708 for the weights of 7 × 7 of ResNet-50 on an H200, 256 instead of 303 for those of 3 × 3.
    The class decides whether that leaves parts long enough: a minimum of two sizes that the call
    asks for has no useful bound, and addresses would need 64 bits.
    """
    rows, columns = (ceildiv(product(sizes), as_expr(_TILE)) for sizes in (node.rows, node.columns))
    tiles = product(node.batch) * rows * columns
    filling = cost.filling_workgroups(target)
    parts = [ONE + as_expr(workgroups - 1) // tiles for workgroups in (filling, 2 * filling)]
    is_long = typical(parts[1]) * cost.INNER_PART <= typical(product(node.inner))
    return parts[is_long]


def _divisors(inner: Sequence[Expr], parts: int) -> Sequence[int] | None:
    """The parts of each of the dimensions, the first ones most; None if they do not divide them.

    Those of a single dimension, or of a last one that a call decides, are whole vectors.
    """
    found, rest = [], parts
    for size in inner:
        found.append(math.gcd(rest, size.divisor))
        rest //= found[-1]
    is_asked = len(inner) == 1 or not inner[-1].is_constant
    whole = not is_asked or found[-1] == 1 or inner[-1].divisor % (_VECTOR * found[-1]) == 0
    return found if rest == 1 and whole else None


def _split_contraction(
    node: Contraction, divided: Sequence[int], buffers: dict[str, Buffer]
) -> list[Node]:
    """A batch of parts, so many of each inner dimension, and their sum."""
    parts = math.prod(divided)
    batch = (as_expr(parts), *node.batch)
    inner = tuple(floordiv(n, as_expr(k)) for n, k in zip(node.inner, divided, strict=True))
    b, k = iteration_symbols("b", batch), iteration_symbols("k", inner)
    part = delinearize(b[0], [as_expr(count) for count in divided])
    moved: dict[Symbol, Expr] = dict(zip(numbered("b", node.batch), b[1:], strict=True))
    for symbol, number, size, within in zip(numbered("k", node.inner), part, inner, k, strict=True):
        moved[symbol] = number * size + within
    lhs, rhs = (substitute_symbols(body, moved) for body in (node.lhs, node.rhs))
    return _as_parts(node, as_expr(parts), inner, (lhs, rhs), moved, buffers)


def _as_parts(
    node: Contraction,
    parts: Expr,
    inner: tuple[Expr, ...],
    operands: tuple[Scalar, Scalar],
    moved: dict[Symbol, Expr],
    buffers: dict[str, Buffer],
) -> list[Node]:
    """A product of parts, the first of its batch dimensions, and their sum.

    Args:
        inner: sizes of a part.
        operands: of the product, over its own symbols.
        moved: its symbols for those of the node.
    """
    name, result, dtype = f"{node.output}_parts", buffers[node.output], node.lhs.dtype
    sizes = (parts, *result.sizes)
    # Each part in the result's own order, and as exact as it was summed.
    buffers[name] = intermediate(name, dtype, sizes, (result.span, *result.strides))
    batch = (parts, *node.batch)
    (b, *_) = iteration_symbols("b", batch)
    first = replace(
        node,
        output=name,
        batch=batch,
        inner=inner,
        lhs=operands[0],
        rhs=operands[1],
        index=(b, *(substitute(i, moved) for i in node.index)),
    )
    return [first, *_sum_of_parts(name, parts, node, buffers)]


def _sum_of_parts(
    name: str, parts: Expr, node: Contraction | DepthwiseWeightGradient, buffers: dict[str, Buffer]
) -> list[Node]:
    """Nodes that add up the parts of a node's result in buffer ``name``: (parts, *its sizes)."""
    dtype, result = buffers[name].dtype, buffers[node.output]
    at = [index(i) for i in point_of(numbered("i", result.sizes))]
    if parts.is_constant and int(parts) <= _MOST_ADDED:
        loads: list[Scalar] = [
            Load(name, (index(as_expr(part)), *at), dtype) for part in range(int(parts))
        ]
        total = cast(reduce(partial(apply, "add"), loads), result.dtype)
        return [Pointwise(node.output, result.sizes, total, origins=node.origins)]
    wide = node.output if result.dtype is dtype else f"{node.output}_sum"
    (r,) = iteration_symbols("r", (parts,))
    load = Load(name, (index(r), *at), dtype)
    added = Reduction(wide, "sum", result.sizes, (parts,), load, origins=node.origins)
    if wide == node.output:
        return [added]
    buffers[wide] = intermediate(wide, dtype, result.sizes)
    narrow = cast(Load(wide, tuple(at), dtype), result.dtype)
    return [added, Pointwise(node.output, result.sizes, narrow, origins=node.origins)]


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
            return _in_parts(node, as_expr(-(-int(inner) // most)), _VECTOR, buffers)
        return None

    return graph.expanded(parts_of)


def _in_parts(node: Contraction, parts: Expr, step: int, buffers: dict[str, Buffer]) -> list[Node]:
    """About so many parts of the inner dimensions, which they need not divide.

    ``step``: elements of a part are a multiple of this, which is one of four.
    """
    inner = product(node.inner)
    chunk = ceildiv(inner, parts * step) * step
    parts = ceildiv(inner, chunk) if chunk.is_constant else parts
    batch = (parts, *node.batch)
    b, (k,) = iteration_symbols("b", batch), iteration_symbols("k", (chunk,))
    moved: dict[Symbol, Expr] = dict(zip(numbered("b", node.batch), b[1:], strict=True))
    lhs, rhs = (
        _part_of(body, moved, ("k", node.inner), b[0] * chunk + k, chunk, const(0, body.dtype))
        for body in (node.lhs, node.rhs)
    )
    return _as_parts(node, parts, (chunk,), (lhs, rhs), moved, buffers)
