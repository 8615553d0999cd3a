"""Canonicalises nodes, then eliminates common ones: each is computed once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ...ir.buffers import Buffer
from ...ir.graph import LoopGraph
from ...ir.nodes import Contraction, Pointwise, Reduction, map_bodies, map_computed, taken_whole
from ...ir.renaming import rename_loads
from ...ir.scalar import Scalar, substitute_symbols
from ...ir.spaces import Node, Space, symbols_in
from ...symbolic.sizes import ONE, ZERO, Expr, substitute


def drop_unit_symbols(graph: LoopGraph) -> LoopGraph:
    """The graph with 0 for every iteration symbol of extent 1, so that equal nodes look equal."""
    nodes = tuple(map_computed(node, _without_units) for node in graph.nodes)
    return graph.with_nodes(nodes, graph.buffers)


def _without_units(value: Scalar | Expr, space: Space) -> Scalar | Expr:
    units = {symbol: ZERO for symbol in symbols_in(space) if symbol.extent is ONE}
    if not units:
        return value
    if isinstance(value, Expr):
        return substitute(value, units)
    return substitute_symbols(value, units)


def eliminate_common_nodes(graph: LoopGraph) -> LoopGraph:
    """The graph without pointwise nodes, reductions and contractions that repeat earlier ones.

    An example is the mask that every layer's attention converts.
    Nodes that outputs show stay, and those whose result another node takes as a whole.
    """
    kept_names = graph.returned.union(*map(taken_whole, graph.nodes))
    first: dict[Hashable, str] = {}
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        renamed = node
        if instead:
            renamed = map_bodies(node, lambda body: rename_loads(body, instead))
        key = _key(renamed, graph.buffers)
        if key is not None and isinstance(renamed, Pointwise | Reduction | Contraction):
            known = first.setdefault(key, renamed.output)
            if known != renamed.output and renamed.output not in kept_names:
                instead[renamed.output] = known
                continue
        nodes.append(renamed)
    if not instead:
        return graph
    buffers = {name: buffer for name, buffer in graph.buffers.items() if name not in instead}
    return graph.with_nodes(tuple(nodes), buffers)


def _key(node: Node, buffers: dict[str, Buffer]) -> Hashable:
    """A key that nodes with equal results in equal layouts share; None if the node has to stay."""
    match node:
        case Pointwise(output) | Reduction(output) | Contraction(output):
            own = replace(node, output="", origins=())
            return own, replace(buffers[output], name="")
        case _:
            return None
