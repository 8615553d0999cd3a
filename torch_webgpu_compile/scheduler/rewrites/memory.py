"""How much memory a graph needs, before its nodes are fused: what is measured against."""

from __future__ import annotations

from ...ir.access import typical_numel
from ...ir.graph import Buffer, LoopGraph
from ...ir.nodes import inputs_of, outputs_of


def nbytes_of(buffer: Buffer) -> int:
    """Bytes of a buffer, of which symbolic sizes count as small ones."""
    return typical_numel(buffer.nbytes)


def alive_nbytes(graph: LoopGraph) -> list[int]:
    """Bytes of what nodes compute that are alive at each node."""
    last: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        last.update(dict.fromkeys((*inputs_of(node), *outputs_of(node)), at))
    last.update(dict.fromkeys(graph.returned, len(graph.nodes)))
    ending = [0] * (len(graph.nodes) + 1)
    found: list[int] = []
    alive = 0
    for at, node in enumerate(graph.nodes):
        for name in outputs_of(node):
            nbytes = nbytes_of(graph.buffers[name])
            alive += nbytes
            ending[last[name]] += nbytes
        found.append(alive)
        alive -= ending[at]
    return found


def held_nbytes(graph: LoopGraph) -> int:
    """What a call needs at once: its arguments, and the most that other buffers ever take."""
    given = [spec.buffer for spec in graph.inputs if spec.buffer is not None]
    arguments = sum(nbytes_of(graph.buffers[name]) for name in (*given, *graph.constants))
    return arguments + max(alive_nbytes(graph), default=0)
