"""Graphs with other expressions for their symbols.

So a graph with size symbols is specialized to known sizes, as if it was captured without symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from ..symbolic.nested import leaves, map_fields
from ..symbolic.sizes import Expr, Symbol, as_expr, atom_expr, substitute, symbols_of
from .buffers import Buffer
from .graph import GraphInput, GraphOutput, LoopGraph, MapGroup, Member
from .ranges import Decisions
from .scalar import SCALARS, Scalar, scalar_symbols, substitute_symbols
from .spaces import Node

Part = Buffer | GraphInput | GraphOutput | Node | MapGroup | Member
_Part = TypeVar("_Part", bound=Part)


def has_symbols(graph: LoopGraph) -> bool:
    """Whether a graph has sizes, strides or offsets that are not known."""
    return any(symbol.extent is None for symbol in symbols_of_parts(_parts(graph)))


def at_sizes(graph: LoopGraph, sizes: Mapping[str, int]) -> LoopGraph:
    """The graph with numbers for the size symbols of these names."""
    symbols = symbols_of_parts(_parts(graph))
    known = [s for s in symbols if s.extent is None and s.name in sizes]
    values = with_extents({symbol: as_expr(sizes[symbol.name]) for symbol in known}, symbols)
    simplify = Decisions().simplify
    return replace(
        graph,
        buffers={name: substituted(b, values, simplify) for name, b in graph.buffers.items()},
        nodes=tuple(substituted(node, values, simplify) for node in graph.nodes),
        inputs=tuple(substituted(entry, values, simplify) for entry in graph.inputs),
        outputs=tuple(substituted(output, values, simplify) for output in graph.outputs),
    )


def with_extents(values: dict[Symbol, Expr], symbols: Iterable[Symbol]) -> dict[Symbol, Expr]:
    """``values``, and for iteration symbols with other extents then those with these extents."""
    values = dict(values)
    for symbol in symbols:
        if symbol.extent is not None:
            extent = substitute(symbol.extent, values)
            if extent is not symbol.extent:
                values[symbol] = atom_expr(Symbol(symbol.name, symbol.lower, extent, None, None))
    return values


def substituted(
    part: _Part, values: Mapping[Symbol, Expr], simplify: Callable[[Scalar], Scalar] = lambda s: s
) -> _Part:
    """The part of a graph, or map group, with expressions for symbols.

    ``simplify`` is applied to its scalars then.
    """

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Expr):
            return substitute(leaf, values)
        if isinstance(leaf, SCALARS):
            return simplify(substitute_symbols(leaf, values))
        return substituted(leaf, values, simplify) if isinstance(leaf, Member) else leaf

    return map_fields(changed, part)


def _parts(graph: LoopGraph) -> tuple[Part, ...]:
    return (*graph.buffers.values(), *graph.inputs, *graph.outputs, *graph.nodes)


def symbols_of_parts(parts: Iterable[Part]) -> dict[Symbol, None]:
    """Every symbol of parts, size symbols before the others that have them in their extents."""
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
