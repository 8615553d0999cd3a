"""Attention masks that leave no key after its query: the kernel then passes over those keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..dtypes import Kind
from ..ir.graph import LoopGraph
from ..ir.nodes import Attention, AttentionGradient, Node, Pointwise, iteration_symbols
from ..ir.scalar import Const, Index, Load, Masked, Op, Scalar
from ..sizes import ONE, Expr
from .inline import body_at

_Producers = Mapping[str, Pointwise]

# What each comparison a ∘ b adds to a - b to say that the sum is at most 0.
_AT_MOST = {"le": 0, "lt": 1}
_AT_LEAST = {"ge": 0, "gt": 1}


def find_causal(graph: LoopGraph) -> LoopGraph:
    """The graph with attentions marked as causal where their bias is -inf for every later key.

    A bias that says nothing else is dropped.
    """
    producers = {node.output: node for node in graph.nodes if isinstance(node, Pointwise)}
    nodes = tuple(_marked(node, producers) for node in graph.nodes)
    return graph.with_nodes(nodes, graph.buffers) if nodes != graph.nodes else graph


def _marked(node: Node, producers: _Producers) -> Node:
    if not isinstance(node, Attention | AttentionGradient) or node.causal or node.bias is None:
        return node
    queries, keys = node.sizes[-4:-2]
    if queries is ONE:
        return node
    (query,), (key,) = iteration_symbols("m", (queries,)), iteration_symbols("n", (keys,))
    bias = _followed(node.bias, producers)
    offsets = [_later_keys(c, query, key) for c in _conditions(bias, producers)]
    if not any(offset is not None and offset >= 0 for offset in offsets):
        return node
    says_more = offsets != [0] or not _is_zero_or_minus_infinity(bias)
    return replace(node, causal=True, bias=node.bias if says_more else None)


def _followed(value: Scalar, producers: _Producers) -> Scalar:
    """A value behind conversions and the buffers that hold it."""
    while True:
        if isinstance(value, Op) and value.name == "cast" and value.dtype.is_float:
            value = value.args[0]
        elif isinstance(value, Load) and value.buffer in producers:
            found = body_at(producers[value.buffer], value.index)
            if found is None:
                return value
            value = found
        else:
            return value


def _conditions(bias: Scalar, producers: _Producers) -> Iterator[Scalar]:
    """What must hold for the bias not to be -inf."""
    match bias:
        case Op("where", (condition, _, other)) | Masked(condition, _, other):
            if _is_constant(_followed(other, producers), -math.inf):
                yield from _conjuncts(condition, producers)


def _conjuncts(condition: Scalar, producers: _Producers) -> Iterator[Scalar]:
    condition = _followed(condition, producers)
    match condition:
        case Op("bitwise_and" | "logical_and", (one, other), dtype) if dtype.kind is Kind.BOOL:
            yield from _conjuncts(one, producers)
            yield from _conjuncts(other, producers)
        case Op("where", (inner, Const(True), Const(False))):  # tril of ones
            yield from _conjuncts(inner, producers)
        case _:
            yield condition


def _later_keys(condition: Scalar, query: Expr, key: Expr) -> int | None:
    """n ≥ 0 for "the key is at most the query - n"; None for anything else that is not like it."""
    match condition:
        case Op(name, (Index(one), Index(other))) if name in _AT_MOST:
            difference = one - other + _AT_MOST[name]
        case Op(name, (Index(one), Index(other))) if name in _AT_LEAST:
            difference = other - one + _AT_LEAST[name]
        case _:
            return None
    offset = difference - (key - query)
    return offset.constant if offset.is_constant else None


def _is_zero_or_minus_infinity(bias: Scalar) -> bool:
    match bias:
        case Op("where", (_, kept, _)) | Masked(_, kept, _):
            return _is_constant(kept, 0.0)
    return False


def _is_constant(value: Scalar, expected: float) -> bool:
    return isinstance(value, Const) and value.value == expected
