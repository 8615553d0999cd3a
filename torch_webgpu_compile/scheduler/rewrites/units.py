"""Dimensions of size 1 have one point: their symbols become 0, so that equal points look equal."""

from __future__ import annotations

from ...ir.graph import LoopGraph
from ...ir.nodes import map_computed
from ...ir.scalar import Scalar, substitute_symbols
from ...ir.spaces import Space, symbols_in
from ...symbolic.sizes import ONE, ZERO, Expr, substitute


def drop_unit_symbols(graph: LoopGraph) -> LoopGraph:
    """The graph with 0 for every iteration symbol of extent 1."""
    nodes = tuple(map_computed(node, _without_units) for node in graph.nodes)
    return graph.with_nodes(nodes, graph.buffers)


def _without_units(value: Scalar | Expr, space: Space) -> Scalar | Expr:
    units = {symbol: ZERO for symbol in symbols_in(space) if symbol.extent is ONE}
    if not units:
        return value
    if isinstance(value, Expr):
        return substitute(value, units)
    return substitute_symbols(value, units)
