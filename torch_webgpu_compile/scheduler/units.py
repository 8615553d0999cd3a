"""Dimensions of size 1 have one point: their symbols become 0, so that equal points look equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.attention_nodes import Attention, AttentionGradient
from ..ir.graph import LoopGraph
from ..ir.nodes import (
    Contraction,
    Fourier,
    Node,
    Pointwise,
    Reduction,
    Scatter,
    TriangularSolve,
    map_bodies,
)
from ..ir.scalar import Scalar, substitute_symbols
from ..ir.spaces import iteration_symbols, symbol_keys
from ..sizes import ONE, ZERO, Expr, Symbol, substitute


def drop_unit_symbols(graph: LoopGraph) -> LoopGraph:
    """The graph with 0 for every iteration symbol of extent 1."""
    return graph.with_nodes(tuple(_drop(node) for node in graph.nodes), graph.buffers)


def _units(**ranges: Sequence[Expr]) -> dict[Symbol, Expr]:
    """The unit symbols of named ranges, each mapped to 0."""
    return {
        s: ZERO
        for prefix, sizes in ranges.items()
        for s in symbol_keys(iteration_symbols(prefix, sizes))
        if s.extent is ONE
    }


def _drop(node: Node) -> Node:
    match node:
        case Pointwise():
            return replace(node, body=_at(node.body, _units(i=node.ranges)))
        case Reduction():
            units = _units(i=node.ranges, r=node.reduce_ranges)
            return replace(node, body=_at(node.body, units))
        case Contraction():
            units = _units(b=node.batch, m=node.rows, n=node.columns, k=node.inner)
            return replace(
                node,
                lhs=_at(node.lhs, units),
                rhs=_at(node.rhs, units),
                index=tuple(substitute(i, units) for i in node.index),
            )
        case Attention():
            batch, heads, queries, keys, head, value_head = node.sizes
            units = _units(b=(batch, heads), m=(queries,), n=(keys,), k=(head,), d=(value_head,))
            return map_bodies(node, lambda body: _at(body, units))
        case AttentionGradient():
            batch, heads, *rest = node.sizes
            single = {prefix: (size,) for prefix, size in zip("gmnkd", rest, strict=True)}
            units = _units(b=(batch, heads), **single)
            return map_bodies(node, lambda body: _at(body, units))
        case TriangularSolve():
            rows, columns = node.sizes
            units = _units(b=node.batch, m=(rows,), k=(rows,), n=(columns,))
            return map_bodies(node, lambda body: _at(body, units))
        case Fourier():
            units = _units(i=node.ranges)
            index = tuple(substitute(entry, units) for entry in node.index)
            mirror = node.mirror and tuple(substitute(entry, units) for entry in node.mirror)
            moved = replace(node, index=index, mirror=mirror)
            return map_bodies(moved, lambda body: _at(body, units))
        case Scatter():
            units = _units(i=node.ranges)
            return replace(
                node,
                index=tuple(_at(i, units) for i in node.index),
                body=_at(node.body, units),
            )
        case _:
            return node


def _at(body: Scalar, units: Mapping[Symbol, Expr]) -> Scalar:
    return substitute_symbols(body, units) if units else body
