"""Nodes that compute the same are computed once: the mask that every layer's attention converts."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ...ir.graph import Buffer, LoopGraph
from ...ir.nodes import Contraction, Pointwise, Reduction, map_bodies, taken_whole
from ...ir.scalar import Load, Scalar, rewrite
from ...ir.spaces import Node


def share_equal_nodes(graph: LoopGraph) -> LoopGraph:
    """The graph without pointwise nodes, reductions and contractions that repeat earlier ones.

    What an output shows stays, and what a node takes as a whole.
    """
    kept_names = graph.returned.union(*map(taken_whole, graph.nodes))
    first: dict[Hashable, str] = {}
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        renamed = _renamed(node, instead) if instead else node
        key = _key(renamed, graph.buffers)
        if key is not None and isinstance(renamed, Pointwise | Reduction | Contraction):
            known = first.setdefault(key, renamed.output)
            if known != renamed.output and renamed.output not in kept_names:
                instead[renamed.output] = known
                continue
        nodes.append(renamed)
    if not instead:
        return graph
    buffers = {name: buffer for name, buffer in graph.buffers.items() if name not in instead}
    return graph.with_nodes(tuple(nodes), buffers)


def _key(node: Node, buffers: dict[str, Buffer]) -> Hashable:
    """Equal for nodes with equal results in equal layouts; None for what may not be shared."""
    match node:
        case Pointwise(output) | Reduction(output) | Contraction(output):
            own = replace(node, output="", origins=())
            return own, replace(buffers[output], name="")
        case _:
            return None


def _renamed(node: Node, instead: dict[str, str]) -> Node:
    """A node that reads other buffers in place of some."""

    def change(scalar: Scalar) -> Scalar | None:
        if isinstance(scalar, Load) and scalar.buffer in instead:
            return Load(instead[scalar.buffer], scalar.index, scalar.dtype)
        return None

    return map_bodies(node, lambda body: rewrite(body, change))
