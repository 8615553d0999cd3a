"""A graph with size symbols, specialized to known sizes: as if captured without symbols."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..symbolic.nested import leaves, map_fields
from ..symbolic.sizes import Expr, Symbol, as_expr, atom_expr, substitute, symbols_of
from .buffers import Buffer
from .graph import GraphInput, GraphOutput, LoopGraph
from .ranges import Decisions
from .scalar import SCALARS, scalar_symbols, substitute_symbols
from .spaces import Node

_Part = TypeVar("_Part", bound=Buffer | GraphInput | GraphOutput | Node)


def has_symbols(graph: LoopGraph) -> bool:
    """Whether a graph has sizes, strides or offsets that are not known."""
    return any(symbol.extent is None for symbol in _symbols(graph))


def at_sizes(graph: LoopGraph, sizes: Mapping[str, int]) -> LoopGraph:
    """The graph with numbers for the size symbols of these names."""
    values: dict[Symbol, Expr] = {}
    for symbol in _symbols(graph):
        if symbol.extent is None and symbol.name in sizes:
            values[symbol] = as_expr(sizes[symbol.name])
    # Iteration symbols have other extents then.
    for symbol in _symbols(graph):
        if symbol.extent is not None:
            extent = substitute(symbol.extent, values)
            if extent is not symbol.extent:
                values[symbol] = atom_expr(Symbol(symbol.name, symbol.lower, extent, None, None))
    known = Decisions()
    return replace(
        graph,
        buffers={name: _changed(buffer, values, known) for name, buffer in graph.buffers.items()},
        nodes=tuple(_changed(node, values, known) for node in graph.nodes),
        inputs=tuple(_changed(entry, values, known) for entry in graph.inputs),
        outputs=tuple(_changed(output, values, known) for output in graph.outputs),
    )


def _changed(part: _Part, values: Mapping[Symbol, Expr], known: Decisions) -> _Part:
    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Expr):
            return substitute(leaf, values)
        if isinstance(leaf, SCALARS):
            return known.simplify(substitute_symbols(leaf, values))
        return leaf

    return map_fields(changed, part)


def _symbols(graph: LoopGraph) -> dict[Symbol, None]:
    """Every symbol of a graph, size symbols before the others that have them in their extents."""
    parts: tuple[Buffer | GraphInput | GraphOutput | Node, ...]
    parts = (*graph.buffers.values(), *graph.inputs, *graph.outputs, *graph.nodes)
    found: dict[Symbol, None] = {}
    for part in parts:
        for leaf in leaves(tuple(getattr(part, field.name) for field in fields(part))):
            for symbol in _symbols_in(leaf):
                if symbol not in found:
                    if symbol.extent is not None:
                        found |= dict.fromkeys(symbols_of(symbol.extent))
                    found[symbol] = None
    return found


def _symbols_in(leaf: Any) -> frozenset[Symbol]:
    if isinstance(leaf, Expr):
        return symbols_of(leaf)
    return scalar_symbols(leaf) if isinstance(leaf, SCALARS) else frozenset()
