"""Forwards the row that a call writes to a key or value cache to the attention that reads it.

A scatter of one row at a position is, for its readers, a choice: element s of the dimension is the
new row where s is the position, else what was there. Attention that makes the choice need not wait
for the scatter, which runs later, beside other kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.access import load_index
from ...ir.attention_nodes import Attention
from ...ir.buffers import BufferOrigin
from ...ir.graph import LoopGraph
from ...ir.nodes import Scatter, inputs_of, map_bodies
from ...ir.scalar import (
    Checked,
    Index,
    Load,
    Masked,
    Scalar,
    apply,
    index,
    loads_of,
    rewrite,
    scalar_symbols,
    substitute_symbols,
)
from ...ir.spaces import Node, numbered
from ...symbolic.sizes import ONE, Expr, Symbol, as_symbol
from ...target import Target


@dataclass(frozen=True, slots=True)
class _Row:
    """A scatter of one row, taken apart.

    Attributes:
        dimension: of the output, that ``position`` is an index into.
        symbols: of the scatter's ranges, per other dimension; None where that has size 1.
    """

    node: Scatter
    dimension: int
    position: Scalar
    symbols: tuple[Symbol | None, ...]


def forward_cache_writes(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which attention over a cache reads a new row from where it is computed.

    Its other rows are read from the input, before the scatter changes it. This is only done where
    nothing then reads the scatter's result, so that the scatter can still be made in place.
    """
    found = (_row_of(node, graph) for node in graph.nodes)
    rows = {row.node.output: row for row in found if row is not None}
    assigned = {
        output.buffer: graph.inputs[output.mutates].buffer
        for output in graph.outputs
        if output.mutates is not None
    }
    nodes = list(graph.nodes)
    for name, row in rows.items():
        initial = row.node.initial
        is_input = graph.buffers[initial].origin is BufferOrigin.INPUT
        if not is_input or assigned.get(name) != initial:
            continue
        readers = [k for k, node in enumerate(nodes) if name in inputs_of(node)]
        changed = {k: _reading(nodes[k], row, graph, target) for k in readers}
        for k, node in changed.items():
            if None not in changed.values() and node is not None:
                nodes[k] = node
    return graph.with_nodes(tuple(nodes), graph.buffers)


def _row_of(node: Node, graph: LoopGraph) -> _Row | None:
    """A scatter as one of a whole row: of all elements at one position of a dimension."""
    if not isinstance(node, Scatter) or node.combines:
        return None
    if any(load.buffer == node.initial for load in loads_of(node.body)):
        return None
    left = {s for s in numbered("i", node.ranges) if s.extent is not ONE}
    found: list[tuple[int, Scalar]] = []
    symbols: list[Symbol | None] = []
    for dimension, entry in enumerate(node.index):
        size = graph.buffers[node.output].sizes[dimension]
        symbol = as_symbol(entry.expr) if isinstance(entry, Index) else None
        if symbol in left and symbol is not None and symbol.extent is size:
            left.remove(symbol)
            symbols.append(symbol)
            continue
        symbols.append(None)
        if size is not ONE:
            found.append((dimension, entry))
    if left or len(found) != 1 or any(s.extent is not None for s in scalar_symbols(found[0][1])):
        return None
    return _Row(node, *found[0], tuple(symbols))


def _reading(node: Node, row: _Row, graph: LoopGraph, target: Target) -> Node | None:
    """A reader of a scatter's result that does not need it; None where there is no such form."""
    if not isinstance(node, Attention) or node.parts == 1:
        return None
    name = row.node.output

    def change(part: Scalar) -> Scalar | None:
        if not isinstance(part, Load) or part.buffer != name:
            return None
        at = load_index(part)
        return part if at is None else _choice(row, part, at)

    changed = map_bodies(node, lambda body: rewrite(body, change))
    is_free = name not in inputs_of(changed)
    return changed if is_free and graph.has_bindings_for(changed, target) else None


def _choice(row: _Row, load: Load, at: tuple[Expr, ...]) -> Scalar:
    mapping = {s: at[k] for k, s in enumerate(row.symbols) if s is not None}
    # The scatter reports a position that is out of range; no key is there.
    position = row.position.position if isinstance(row.position, Checked) else row.position
    here = apply("eq", index(at[row.dimension]), position)
    new = substitute_symbols(row.node.body, mapping)
    return Masked(here, new, Load(row.node.initial, load.index, load.dtype))
