"""Inlining: a pointwise producer is recomputed where it is read, and its buffer disappears."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from ... import dtypes
from ...ir.access import load_index
from ...ir.attention_nodes import Attention, AttentionGradient
from ...ir.buffers import BufferOrigin
from ...ir.depthwise_nodes import DepthwiseConvolution
from ...ir.factors import factor_of, units_config
from ...ir.graph import LoopGraph
from ...ir.nodes import (
    Contraction,
    Fourier,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    bodies_of,
    inputs_of,
    map_bodies,
    outputs_of,
    taken_whole,
)
from ...ir.scalar import (
    CALL_COST,
    LOOPING_CALL_COST,
    OPS,
    FunctionCall,
    Index,
    Load,
    Masked,
    Op,
    Scalar,
    cast,
    loads_of,
    rewrite,
    walk,
)
from ...ir.spaces import Node, named_bodies, numbered
from ...symbolic.sizes import (
    Expr,
    Symbol,
    as_symbol,
    magnitude,
    product,
    substitute,
    symbols_of,
    typical,
    upper_bound,
)
from ...target import Target
from .. import cost
from ..looped import is_looped
from ..mapping import point_of

_SUMS = (Contraction, Attention, DepthwiseConvolution, Reduction)
_MAX_BODY = 400  # nodes: drivers compile longer code in more than linear time


def body_cost(body: Scalar) -> int:
    """The arithmetic of one element, counted in multiplications."""
    total = 0
    for node in walk(body):
        if isinstance(node, Op):
            total += OPS[node.name].cost
        elif isinstance(node, FunctionCall):
            total += LOOPING_CALL_COST if node.function.has_loops else CALL_COST
    return total


def inline_producers(graph: LoopGraph, target: Target) -> LoopGraph:
    """Inlines every pointwise node for which recomputing costs less than storing and loading."""
    nodes: dict[str, Node] = {outputs_of(n)[0]: n for n in graph.nodes}
    order = [outputs_of(n)[0] for n in graph.nodes]
    readers: dict[str, set[str]] = defaultdict(set)
    for name, node in nodes.items():
        for buffer in inputs_of(node):
            readers[buffer].add(name)
    for name in order:
        node = nodes[name]
        if not isinstance(node, Pointwise) or name in graph.returned or not readers[name]:
            continue
        users = [nodes[r] for r in sorted(readers[name])]
        merged = [inline_into(user, node) for user in users]
        if any(m is None for m in merged) or not _pays(node, users, graph, target):
            continue
        if is_looped(node.body, target) and not all(isinstance(u, Pointwise) for u in users):
            continue
        if any(not _fits(m, graph, target) for m in merged if m is not None):
            continue
        for user, new in zip(users, merged, strict=True):
            assert new is not None
            key = outputs_of(user)[0]
            nodes[key] = new
            for buffer in inputs_of(node):
                readers[buffer].add(key)
        for buffer in inputs_of(node):
            readers[buffer].discard(name)
        del nodes[name]
    kept = tuple(nodes[name] for name in order if name in nodes)
    # A producer that does not depend on where it is read takes what computed the index with it.
    return replace(graph, nodes=kept).live()


def _fits(node: Node, graph: LoopGraph, target: Target) -> bool:
    short = all(sum(1 for _ in walk(body)) <= _MAX_BODY for body in bodies_of(node))
    return short and graph.has_bindings_for(node, target)


def _pays(node: Pointwise, users: list[Node], graph: LoopGraph, target: Target) -> bool:
    """Whether recomputing ``node`` in its readers beats writing it once and reading it back."""
    own_work = body_cost(node.body)
    loads = loads_of(node.body)
    numel, each = typical(product(node.ranges)), own_work + len(loads)
    free = not loads and cost.is_cheap(own_work, 4, target)
    if _is_query(node, users):
        (user,) = users
        assert isinstance(user, Attention)
        return cost.is_within_a_dispatch(numel * user.parts * each, target)
    if _is_new_row(node, users):
        parts = max(user.parts for user in users if isinstance(user, Attention))
        within = cost.is_within_a_dispatch(numel * parts * each, target)
        return within and not _is_epilogue(node, graph)
    if any(user.TILED for user in users):
        # Tiles are loaded many times; and a producer's epilogue would compute this for free.
        reads_anchor = any(
            isinstance(producer, (*_SUMS, AttentionGradient))
            for producer in graph.nodes
            if not {load.buffer for load in loads}.isdisjoint(outputs_of(producer))
        )
        cheap = cost.is_cheap_in_tiles(own_work, len(loads), target)
        once = len(users) == 1 and _is_loaded_once(node, users[0])
        beside = len(users) == 1 and _is_beside_units(node, users[0], own_work, target)
        unbound = len(users) == 1 and _is_beyond_bindings(node, users[0], graph, target)
        masks = _is_of_scores(node, users, graph) and cost.is_cheap_in_scores(own_work, target)
        return free or ((cheap or once or beside or unbound or masks) and not reads_anchor)
    repeats = sum(_repeats(node, user) for user in users)
    if free or _is_widening(node) or (len(users) == 1 and repeats <= 1):
        return True
    from_inputs = all(graph.buffers[b].origin is BufferOrigin.INPUT for b in inputs_of(node))
    small = cost.is_cheap(own_work, 1, target) and cost.is_within_a_dispatch(
        numel * repeats * each, target
    )
    if from_inputs and small and cost.are_few_readers(len(users)):
        return True
    own = numel * graph.buffers[node.output].dtype.itemsize
    sites = Counter(load.buffer for load in set(loads))
    read = sum(
        min(typical(graph.buffers[b].numel), count * numel) * graph.buffers[b].dtype.itemsize
        for b, count in sites.items()
    )
    extra_reads = max(0, (len(users) - 1) * read - len(users) * own)
    extra_work = own_work * (repeats - 1)
    return extra_reads <= own and cost.is_cheap(extra_work, max(1, len(users)), target)


def _is_query(node: Pointwise, users: list[Node]) -> bool:
    """Whether a node is only the query of an attention whose workgroups load each query once."""
    if len(users) != 1 or not isinstance(users[0], Attention) or users[0].parts == 1:
        return False
    user = users[0]
    others = [body for name, body in named_bodies(user).items() if name != "query"]
    return all(load.buffer != node.output for body in others for load in loads_of(body))


def _is_of_scores(node: Pointwise, users: list[Node], graph: LoopGraph) -> bool:
    """Whether attention alone reads a node, for each score, and it is made of much smaller tensors.

    So a mask of documents, which is made of a number for each query and one for each key.
    """
    for user in users:
        if not isinstance(user, (Attention, AttentionGradient)):
            return False
        for name, body in named_bodies(user).items():
            if name not in user.PAIRS and any(b.buffer == node.output for b in loads_of(body)):
                return False
    read = sum(typical(graph.buffers[name].numel) for name in inputs_of(node))
    return cost.are_many_scores(typical(product(node.ranges)), read)


def _is_new_row(node: Pointwise, users: list[Node]) -> bool:
    """Whether a node is only a row that is written to a cache of attention in parts.

    Then few invocations, in one of the parts, read it: see `cache_writes`.
    """
    attention = [user for user in users if isinstance(user, Attention)]
    return (
        0 < len(attention) < len(users)
        and all(isinstance(user, (Attention, Scatter)) for user in users)
        and all(user.parts > 1 for user in attention)
        and all(_reads_as_choice(body, node.output) for u in attention for body in bodies_of(u))
    )


def _reads_as_choice(body: Scalar, name: str) -> bool:
    """Whether a body loads a buffer under conditions only."""

    def change(part: Scalar) -> Scalar | None:
        return part.other if isinstance(part, Masked) else None

    return all(load.buffer != name for load in loads_of(rewrite(body, change)))


def _is_widening(node: Pointwise) -> bool:
    """Whether a node only converts what it loads to a wider dtype: as few bytes are better read."""
    match node.body:
        case Op("cast", (Load() as load,)):
            return load.dtype.itemsize < node.body.dtype.itemsize
    return False


def _is_loaded_once(node: Pointwise, user: Node) -> bool:
    """Whether a node is an operand of a product of so few rows that one workgroup has them all.

    So dequantized weights need no memory. Not what is joined of parts: it is loaded in pieces.
    """
    if not _reads_right(user, node) or any(isinstance(p, Masked) for p in walk(node.body)):
        return False
    rows = upper_bound(product(user.rows))
    return rows is not None and cost.are_few_rows(rows)


def _is_beside_units(node: Pointwise, user: Node, work: int, target: Target) -> bool:
    """Whether a node is the right operand, of 16 bits, of a product in matrix units.

    They leave invocations free for the arithmetic, and dequantized weights need no memory.
    """
    if not _reads_right(user, node):
        return False
    rows = magnitude(product(user.rows))
    has_units = factor_of([user]) == "f16" and units_config([user], target) is not None
    return rows is not None and has_units and cost.is_cheap_in_units(work, rows, target)


def _is_beyond_bindings(node: Pointwise, user: Node, graph: LoopGraph, target: Target) -> bool:
    """Whether a node is a dequantized weight of a product, of which no binding reaches a copy.

    It is computed for every tile of rows then, from half of its bytes or less.
    """
    own, *read = (typical(graph.buffers[name].nbytes) for name in (node.output, *inputs_of(node)))
    most = target.max_binding_nbytes
    return _reads_right(user, node) and own > most and max(read, default=0) <= min(most, own // 2)


def _reads_right(user: Node, node: Pointwise) -> TypeGuard[Contraction]:
    """Whether a reader of a node is a product, of which that is in the right operand alone."""
    return isinstance(user, Contraction) and all(
        load.buffer != node.output for load in loads_of(user.lhs)
    )


def _is_epilogue(node: Pointwise, graph: LoopGraph) -> bool:
    """Whether a kernel of sums can compute a node from its results, at the same points."""
    sums = {outputs_of(producer)[0] for producer in graph.nodes if isinstance(producer, _SUMS)}
    here = point_of(numbered("i", node.ranges))
    found = [load for load in loads_of(node.body) if load.buffer in sums]
    return bool(found) and all(load_index(load) == here for load in found)


def _repeats(node: Pointwise, user: Node) -> float:
    """How often a reader computes each element of ``node`` when it is inlined."""
    points = typical(product(user.extents))
    found = [{load for load in loads_of(b) if load.buffer == node.output} for b in bodies_of(user)]
    # A scan's bodies are computed together.
    sites = len(set().union(*found)) if isinstance(user, Scan) else sum(map(len, found))
    each = points / max(1, typical(product(node.ranges)))
    # Sites of a transform are the real and the imaginary part: each reads its half.
    return sites * (each if isinstance(user, Fourier) else max(1.0, each))


def inline_into(user: Node, producer: Pointwise) -> Node | None:
    """``user`` with the producer's body in place of every load of its output; None if it cannot be.

    Not for users that load the output at indices from data in tiles, for those that take it or what
    it is made of as a whole, as host calls and scatters do, and where `body_at` has no body.
    """
    whole = taken_whole(user)
    reads_whole = not set(whole).isdisjoint(inputs_of(producer))
    if producer.output in whole or (reads_whole and not isinstance(user, Scatter)):
        return None
    inlined: dict[Scalar, Scalar | None] = {}

    def change(node: Scalar) -> Scalar | None:
        if isinstance(node, Load) and node.buffer == producer.output and node not in inlined:
            # Tiles are loaded at affine indices.
            gathers = load_index(node) is None and not isinstance(user, (Pointwise, Reduction))
            inlined[node] = None if gathers else body_at(producer, node.index)
        return inlined.get(node)

    made = map_bodies(user, lambda body: rewrite(body, change))
    if None in inlined.values():
        return None
    if reads_whole and isinstance(made, Scatter) and not made.reads_own_elements:
        return None  # it could not be done in place
    origins = tuple(dict.fromkeys(producer.origins + user.origins))
    return replace(made, origins=origins)


def body_at(producer: Pointwise, index: Sequence[Scalar]) -> Scalar | None:
    """A producer's body at an index, which may have entries that are computed from data.

    None if such an entry would stand inside of index arithmetic: only a symbol by itself can be
    replaced by a value from data.
    """
    symbols = numbered("i", producer.ranges)
    affine: dict[Symbol, Expr] = {}
    gathered: dict[Symbol, Scalar] = {}
    for symbol, entry in zip(symbols, index, strict=True):
        if isinstance(entry, Index):
            affine[symbol] = entry.expr
        else:
            gathered[symbol] = cast(entry, dtypes.int64)
    if any(
        isinstance(node, Index)
        and as_symbol(node.expr) not in gathered
        and not symbols_of(node.expr).isdisjoint(gathered)
        for node in walk(producer.body)
    ):
        return None

    def change(node: Scalar) -> Scalar | None:
        if not isinstance(node, Index):
            return None
        symbol = as_symbol(node.expr)
        if symbol is not None and symbol in gathered:
            return gathered[symbol]
        return Index(substitute(node.expr, affine))

    return rewrite(producer.body, change)
