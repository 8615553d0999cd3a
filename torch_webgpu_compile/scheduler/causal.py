"""Attention masks that leave no key after its query: the kernel then passes over those keys.

A mask that follows from constants alone, as of one document without padding, is computed here: it
often says nothing more, or nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import Kind
from ..ir.graph import Buffer, BufferOrigin, GraphOutput, LoopGraph
from ..ir.interpret import interpret
from ..ir.nodes import (
    Attention,
    AttentionGradient,
    Node,
    Pointwise,
    Reduction,
    iteration_symbols,
    symbol_keys,
)
from ..ir.scalar import Const, Index, Load, Masked, Op, Scalar, scalar_symbols, substitute_symbols
from ..sizes import ONE, ZERO, Expr, contiguous_strides, product
from .inline import body_at

_Producers = Mapping[str, Pointwise]

# Elements of a mask that is computed while compiling, and what a node on the way may go through.
_MOST = 1 << 22

# What each comparison a ∘ b adds to a - b to say that the sum is at most 0.
_AT_MOST = {"le": 0, "lt": 1}
_AT_LEAST = {"ge": 0, "gt": 1}


def find_causal(graph: LoopGraph) -> LoopGraph:
    """The graph with attentions marked as causal where their bias is -inf for every later key.

    A bias that says nothing else is dropped.
    """
    producers = {node.output: node for node in graph.nodes if isinstance(node, Pointwise)}
    known: dict[Scalar, npt.NDArray[Any] | None] = {}
    nodes = tuple(_marked(node, graph, producers, known) for node in graph.nodes)
    return replace(graph, nodes=nodes).live() if nodes != graph.nodes else graph


def _marked(
    node: Node,
    graph: LoopGraph,
    producers: _Producers,
    known: dict[Scalar, npt.NDArray[Any] | None],
) -> Node:
    if not isinstance(node, Attention | AttentionGradient) or node.causal or node.bias is None:
        return node
    if node.bias not in known:
        known[node.bias] = _constant_mask(node, graph)
    mask = known[node.bias]
    if mask is not None and not mask.any():
        return replace(node, bias=None)
    if mask is not None and np.array_equal(mask, np.where(np.tri(*mask.shape), 0, -np.inf)):
        return replace(node, causal=True, bias=None)
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


def _constant_mask(
    node: Attention | AttentionGradient, graph: LoopGraph
) -> npt.NDArray[Any] | None:
    """The bias of all heads, [query, key], if it follows from constants alone and is not large."""
    assert node.bias is not None
    sizes = node.sizes[-4:-2]
    (query,), (key,) = iteration_symbols("m", sizes[:1]), iteration_symbols("n", sizes[1:])
    if not _is_small(sizes) or not scalar_symbols(node.bias) <= {*symbol_keys((query, key))}:
        return None
    rows = dict(zip(symbol_keys((query, key)), iteration_symbols("i", sizes), strict=True))
    name = "(mask)"  # no node of a graph has such a name
    mask = Pointwise(name, sizes, substitute_symbols(node.bias, rows))
    strides = contiguous_strides(sizes)
    buffer = Buffer(name, node.bias.dtype, sizes, strides, ZERO, BufferOrigin.INTERMEDIATE)
    alone = replace(
        graph,
        nodes=(*graph.nodes, mask),
        buffers={**graph.buffers, name: buffer},
        inputs=(),
        outputs=(GraphOutput(name, sizes, strides, ZERO),),
    ).live()
    if any(b.origin is BufferOrigin.INPUT for b in alone.buffers.values()):
        return None
    for part in alone.nodes:
        if not isinstance(part, Pointwise | Reduction) or not _is_small(_points(part)):
            return None
    (found,) = interpret(alone, [])
    return np.asarray(found)


def _points(node: Pointwise | Reduction) -> tuple[Expr, ...]:
    return node.ranges + (node.reduce_ranges if isinstance(node, Reduction) else ())


def _is_small(sizes: tuple[Expr, ...]) -> bool:
    count = product(sizes)
    return count.is_constant and 0 < count.constant <= _MOST
