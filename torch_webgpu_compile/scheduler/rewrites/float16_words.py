"""float16 without the type `f16`: two elements in a word, as bfloat16 is stored everywhere."""

from __future__ import annotations

from dataclasses import replace

from ...dtypes import DType, float16, float16_in_words
from ...ir.graph import LoopGraph
from ...ir.nodes import bodies_of, map_bodies
from ...ir.scalar import Const, Load, Op, Scalar, rewrite, walk
from ...target import Target


def store_float16_in_words(graph: LoopGraph, target: Target) -> LoopGraph:
    """The same graph with `float16_in_words` for float16, where the GPU lacks ``shader-f16``.

    Arithmetic is the same: float16 is computed in f32 anyway.
    """
    if target.has_float16 or not _has_float16(graph):
        return graph
    buffers = {n: replace(b, dtype=_stored(b.dtype)) for n, b in graph.buffers.items()}
    nodes = tuple(map_bodies(node, lambda body: rewrite(body, _changed)) for node in graph.nodes)
    return replace(graph, buffers=buffers, nodes=nodes)


def _has_float16(graph: LoopGraph) -> bool:
    return any(buffer.dtype is float16 for buffer in graph.buffers.values()) or any(
        node.dtype is float16 for n in graph.nodes for body in bodies_of(n) for node in walk(body)
    )


def _stored(dtype: DType) -> DType:
    return float16_in_words if dtype is float16 else dtype


def _changed(node: Scalar) -> Scalar | None:
    match node:
        case Const(value, dtype) if dtype is float16:
            return Const(value, float16_in_words)
        case Load(buffer, index, dtype) if dtype is float16:
            return Load(buffer, index, float16_in_words)
        case Op(name, args, dtype) if dtype is float16:
            return Op(name, args, float16_in_words)
    return None
