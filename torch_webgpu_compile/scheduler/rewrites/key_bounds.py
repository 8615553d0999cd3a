"""Bounds the keys of attention whose mask ends at a position that is data, as of a growing cache.

Like `causal`, for masks such as "the key's number is at most the position": kernels then neither
read nor compute what comes after, so that a token costs what the cache holds, not what it could.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ... import dtypes
from ...ir.attention_nodes import Attention
from ...ir.graph import LoopGraph
from ...ir.nodes import Pointwise
from ...ir.scalar import (
    Const,
    Index,
    Op,
    Scalar,
    apply,
    cast,
    const,
    index,
    loads_of,
    scalar_symbols,
    where,
)
from ...ir.spaces import Node, iteration_symbols, symbol_keys
from ...symbolic.sizes import ONE, Expr, Symbol, substitute, typical
from ...target import Target
from .. import cost
from .causal import at_most, conditions_of, followed, is_zero_or_lowest, sides_of

_Producers = Mapping[str, Pointwise]


def bound_keys_by_mask(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph in which attention has an upper bound of its keys from its mask, where that pays.

    The bias stays, as it may say more; of a single query that has no other mask it goes.
    """
    producers = {node.output: node for node in graph.nodes if isinstance(node, Pointwise)}
    nodes = tuple(_ended(node, graph, producers, target) for node in graph.nodes)
    return replace(graph, nodes=nodes).live() if nodes != graph.nodes else graph


def _ended(node: Node, graph: LoopGraph, producers: _Producers, target: Target) -> Node:
    if not isinstance(node, Attention) or node.bias is None or node.causal:
        return node
    if node.kept is not None or node.logsumexp is not None or not _pays(node, graph, target):
        return node
    bias = followed(node.bias, producers)
    conditions = list(conditions_of(bias, producers))
    queries, keys = node.sizes[2:4]
    found = (_end(condition, queries, keys, producers) for condition in conditions)
    end = next((e for e in found if e is not None), None)
    if end is None:
        return node
    is_all = len(conditions) == 1 and node.replaced is None and is_zero_or_lowest(bias, producers)
    if not any(isinstance(s, Const) and s.value == -math.inf for s in sides_of(bias, producers)):
        # Something like -1e9 leaves weights to a row in which it is everywhere.
        if not is_all or queries is not ONE:
            return node
        end = where(apply("eq", end, const(0, end.dtype)), cast(index(keys), end.dtype), end)
        is_all = False
    ended = replace(node, end=end, bias=None if is_all and queries is ONE else node.bias)
    return ended if graph.has_bindings_for(ended, target) else node


def _pays(node: Attention, graph: LoopGraph, target: Target) -> bool:
    loaded = {load.buffer for body in (node.key, node.value) for load in loads_of(body)}
    buffers = (graph.buffers[name] for name in loaded)
    return cost.waits_for_key_end(
        sum(typical(buffer.numel) * buffer.dtype.itemsize for buffer in buffers), target
    )


def _end(condition: Scalar, queries: Expr, keys: Expr, producers: _Producers) -> Scalar | None:
    """The first key of a query, int32 and at most ``keys``, for which a condition does not hold.

    None for a condition that says something else, or may end earlier for a later query.
    """
    found = at_most(condition)
    if found is None or not isinstance(found[0], Index):
        return None
    number, last, above = found[0].expr, *found[1:]
    (query,), (key,) = iteration_symbols("m", (queries,)), iteration_symbols("n", (keys,))
    symbols = dict(zip("mn", symbol_keys((query, key)), strict=True))
    if last.dtype is not dtypes.int64 or number is not key or symbols["n"] in scalar_symbols(last):
        return None
    later = {symbols["m"]: query + 1}
    if not _grows(last, later, producers):
        return None
    # First within bounds, so that the largest integer can be added to.
    least = const(above - 1, last.dtype)
    most = apply("sub", cast(index(keys), last.dtype), 1 - above)
    within = apply("maximum", apply("minimum", last, most), least)
    return cast(apply("add", within, const(1 - above, last.dtype)), dtypes.int32)


def _grows(value: Scalar, later: Mapping[Symbol, Expr], producers: _Producers) -> bool:
    """Whether an integer is at least as large for the next query, whose symbol ``later`` has."""
    if scalar_symbols(value).isdisjoint(later):
        return True
    value = followed(value, producers)
    match value:
        case Index(expr):
            step = substitute(expr, later) - expr
            return step.is_constant and step.constant >= 0
        case Op("add" | "minimum" | "maximum", parts):
            return all(_grows(part, later, producers) for part in parts)
    return scalar_symbols(value).isdisjoint(later)
