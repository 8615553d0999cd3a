"""Recognizes causal masks of attention, and those of a sliding window.

The kernel then passes over the keys that such a mask excludes.

A mask is a bias of -inf, or one like -1e9 that takes the place of scores or is added to them. The
latter leaves a row without other keys its weights: it is the same only where each query has a key.

A mask that follows from constants alone, as of one document without padding, is computed here: it
often says nothing more, or nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ...dtypes import Kind
from ...ir.attention_nodes import Attention, AttentionGradient
from ...ir.buffers import BufferOrigin, intermediate
from ...ir.graph import GraphOutput, LoopGraph
from ...ir.interpret import interpret
from ...ir.nodes import Pointwise, Reduction
from ...ir.scalar import (
    Const,
    Index,
    Load,
    Masked,
    Op,
    Scalar,
    apply,
    const,
    scalar_symbols,
    substitute_symbols,
)
from ...ir.spaces import Node, iteration_symbols, numbered, symbol_keys
from ...symbolic.sizes import ONE, ZERO, Expr, as_expr, product
from .inline import body_at

_Producers = Mapping[str, Pointwise]

# Elements of a mask that is computed while compiling, and what a node on the way may go through.
_MOST = 1 << 22

# With a score that is lower than what finite numbers of use give, exp(score - highest) is 0. The
# lowest float16 is the same for scores in float16, whose neighbours there are 32 apart.
_LOWEST, _LOWEST_FLOAT16 = -1e9, -65504.0

AT_MOST = {"le": 0, "lt": 1}
"""What a comparison a ∘ b adds to a to say that the sum is at most b."""

AT_LEAST = {"ge": 0, "gt": 1}
"""What it adds to b to say that the sum is at most a."""

_FARTHEST = 1 << 30  # of a window: kernels count in 32 bits

_OPPOSITE = {"le": "gt", "gt": "le", "lt": "ge", "ge": "lt", "eq": "ne", "ne": "eq"}

# The bias and what is replaced, [query, key] of all heads.
_Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]
_Known = dict[tuple[Scalar, Scalar | None], _Arrays | None]


def find_causal_masks(graph: LoopGraph) -> LoopGraph:
    """The graph in which attention whose mask excludes every key after its query is causal.

    It has a window where every key is excluded that is further back. The mask is dropped where it
    excludes nothing else.
    """
    producers = {node.output: node for node in graph.nodes if isinstance(node, Pointwise)}
    known: _Known = {}
    nodes = tuple(_marked(node, graph, producers, known) for node in graph.nodes)
    return replace(graph, nodes=nodes).live() if nodes != graph.nodes else graph


def _marked(node: Node, graph: LoopGraph, producers: _Producers, known: _Known) -> Node:
    if not isinstance(node, Attention | AttentionGradient) or node.causal or node.bias is None:
        return node
    mask = node.bias, node.replaced
    if mask not in known:
        known[mask] = _constant_mask(node, graph)
    arrays = known[mask]
    if arrays is not None and not arrays[0].any() and not arrays[1].any():
        return replace(node, bias=None, replaced=None)
    if arrays is not None and _is_causal(*arrays):
        return replace(node, causal=True, bias=None, replaced=None)
    queries, keys = node.sizes[-4:-2]
    if queries is ONE:
        return node
    (query,), (key,) = iteration_symbols("m", (queries,)), iteration_symbols("n", (keys,))
    bias = followed(node.bias, producers)
    # A row whose scores are all -inf is 0 or NaN with less of them, too. In a gradient eager has
    # NaN for its later keys as well, but has NaN for its first key anyway.
    removes = any(_is_constant(side, -math.inf) for side in sides_of(bias, producers))
    found = _bounds(list(conditions_of(bias, producers)), query, key, removes)
    if not found.causal and found.window is None:
        return node
    marked = replace(node, causal=found.causal, window=found.window)
    says_more = found.say_more or not is_zero_or_lowest(bias, producers)
    if node.replaced is not None:
        kept = list(_conjuncts(node.replaced, producers, holds=False))
        says_more = says_more or _bounds(kept, query, key, removes) != found
    if not says_more:
        return replace(marked, bias=None, replaced=None)
    return marked if removes else node


def _is_causal(bias: npt.NDArray[Any], replaced: npt.NDArray[Any]) -> bool:
    """Whether masks, as arrays, leave exactly the keys that are not later."""
    earlier = np.tri(*bias.shape) != 0
    later = bias[np.logical_not(earlier)]
    is_lowest = (later <= _LOWEST) | (later == _LOWEST_FLOAT16)
    return not bias[earlier].any() and not replaced[earlier].any() and bool(is_lowest.all())


def followed(value: Scalar, producers: _Producers) -> Scalar:
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


def conditions_of(bias: Scalar, producers: _Producers) -> Iterator[Scalar]:
    """The conditions under which the bias is not the lowest."""
    match bias:
        case Op("where", (condition, one, other)) | Masked(condition, one, other):
            if _is_lowest(followed(other, producers)):
                yield from _conjuncts(condition, producers)
            elif _is_lowest(followed(one, producers)):
                yield from _conjuncts(condition, producers, holds=False)


def _conjuncts(condition: Scalar, producers: _Producers, holds: bool = True) -> Iterator[Scalar]:
    """The conditions that make a condition hold, or not: a bool, or a number that is not 0."""
    condition = followed(condition, producers)
    is_bool = condition.dtype.kind is Kind.BOOL
    match condition:
        case Op("bitwise_and", parts) if is_bool and holds:
            for part in parts:
                yield from _conjuncts(part, producers)
        case Op("bitwise_or", parts) if is_bool and not holds:
            for part in parts:
                yield from _conjuncts(part, producers, holds=False)
        case Op("bitwise_not", (inner,)) if is_bool:
            yield from _conjuncts(inner, producers, not holds)
        case Op("cast", (inner,)) if is_bool or not inner.dtype.is_float:
            yield from _conjuncts(inner, producers, holds)
        case Op("ne", (inner, Const(0))):
            yield from _conjuncts(inner, producers, holds)
        case Op("eq", (inner, Const(0))):
            yield from _conjuncts(inner, producers, not holds)
        case Op("where", (inner, Const(one), Const(other))) | Masked(
            inner, Const(one), Const(other)
        ) if bool(one) != bool(other):  # tril of ones
            yield from _conjuncts(inner, producers, holds if one else not holds)
        case Op(name, parts) if not holds and name in _OPPOSITE:
            yield apply(_OPPOSITE[name], *parts)
        case _:
            yield condition if holds else apply("eq", condition, const(0, condition.dtype))


@dataclass(frozen=True)
class _Bounds:
    """Bounds, by the conditions for a key to be there, of its distance from the query.

    Attributes:
        causal: the key is at most the query.
        window: the query is at most so many keys further.
        say_more: whether they say more than that.
    """

    causal: bool
    window: int | None
    say_more: bool


def _bounds(conditions: Sequence[Scalar], query: Expr, key: Expr, removes: bool) -> _Bounds:
    """``removes``: whether other keys have no weight, even where they are all that there is."""
    differences = [_at_most_zero(condition) for condition in conditions]
    later = [_constant_of(d, key - query) for d in differences]
    earlier = [_constant_of(d, query - key) if removes else None for d in differences]
    windows = [-offset for offset in earlier if offset is not None and abs(offset) < _FARTHEST]
    return _Bounds(
        any(offset is not None and offset >= 0 for offset in later),
        min(windows, default=None),
        later.count(0) + len(windows) < len(differences) or 0 not in later,
    )


def at_most(condition: Scalar) -> tuple[Scalar, Scalar, int] | None:
    """(a, b, n) of a condition that says a + n ≤ b."""
    match condition:
        case Op(name, (one, other)) if name in AT_MOST:
            return one, other, AT_MOST[name]
        case Op(name, (other, one)) if name in AT_LEAST:
            return one, other, AT_LEAST[name]
    return None


def _at_most_zero(condition: Scalar) -> Expr | None:
    """A number that is at most 0 exactly where the condition holds."""
    found = at_most(condition)
    one, other = (None, None) if found is None else map(_index_of, found[:2])
    return None if found is None or one is None or other is None else one - other + found[2]


def _index_of(value: Scalar) -> Expr | None:
    match value:
        case Index(expr):
            return expr
        case Const(int() as number):
            return as_expr(number)
    return None


def _constant_of(difference: Expr | None, distance: Expr) -> int | None:
    """n for ``distance + n``."""
    if difference is None:
        return None
    offset = difference - distance
    return offset.constant if offset.is_constant else None


def sides_of(bias: Scalar, producers: _Producers) -> tuple[Scalar, ...]:
    """The values that a bias chooses between."""
    match bias:
        case Op("where", (_, one, other)) | Masked(_, one, other):
            return followed(one, producers), followed(other, producers)
    return ()


def is_zero_or_lowest(bias: Scalar, producers: _Producers) -> bool:
    """Whether a bias says of each key that it is there or not, and no more."""
    sides = sides_of(bias, producers)
    return any(map(_is_lowest, sides)) and any(_is_constant(side, 0.0) for side in sides)


def _is_lowest(value: Scalar) -> bool:
    if not isinstance(value, Const) or isinstance(value.value, complex):
        return False
    return value.value <= _LOWEST or value.value == _LOWEST_FLOAT16


def _is_constant(value: Scalar, expected: float) -> bool:
    return isinstance(value, Const) and value.value == expected


def _constant_mask(node: Attention | AttentionGradient, graph: LoopGraph) -> _Arrays | None:
    """The mask of all heads, [query, key], if it follows from constants alone and is not large."""
    assert node.bias is not None
    bias = _evaluated(node.bias, node, graph)
    if bias is None:
        return None
    if node.replaced is None:
        return bias, np.zeros(bias.shape, bool)
    replaced = _evaluated(node.replaced, node, graph)
    return None if replaced is None else (bias, replaced)


def _evaluated(
    body: Scalar, node: Attention | AttentionGradient, graph: LoopGraph
) -> npt.NDArray[Any] | None:
    """A body over queries and keys, if it is the same for all of the batch and all heads."""
    pairs = symbol_keys(
        iteration_symbols("m", node.sizes[-4:-3]) + iteration_symbols("n", node.sizes[-3:-2])
    )
    points = [s for prefix, extents in node.spaces["bias"] for s in numbered(prefix, extents)]
    if not scalar_symbols(body) <= {*points}:
        return None
    kept = [s for s in points if s in pairs or s in scalar_symbols(body)]
    sizes = tuple(s.extent for s in kept if s.extent is not None)
    if not _is_small(sizes):
        return None
    rows = dict(zip(kept, iteration_symbols("i", sizes), strict=True))
    name = "(mask)"  # no node of a graph has such a name
    mask = Pointwise(name, sizes, substitute_symbols(body, rows))
    buffer = intermediate(name, body.dtype, sizes)
    alone = replace(
        graph,
        nodes=(*graph.nodes, mask),
        buffers={**graph.buffers, name: buffer},
        inputs=(),
        outputs=(GraphOutput(name, sizes, buffer.strides, ZERO),),
    ).live()
    if any(b.origin is BufferOrigin.INPUT for b in alone.buffers.values()):
        return None
    for part in alone.nodes:
        if not isinstance(part, Pointwise | Reduction) or not _is_small(part.extents):
            return None
    (result,) = interpret(alone, [])
    masks = np.asarray(result)
    masks = masks.reshape(-1, *masks.shape[-2:])
    return masks[0] if (masks == masks[:1]).all() else None


def _is_small(sizes: tuple[Expr, ...]) -> bool:
    count = product(sizes)
    return count.is_constant and 0 < count.constant <= _MOST
