"""Hoists work on parameters and constants alone out of calls: it is computed once.

Weights in the layout that a kernel wants, tables of positions, masks, products of weights: their
nodes become a graph of its own, the *preparation*, and its results are kept beside the parameters.
What is inlined into the kernel that reads it, as a cast of a weight, costs no dispatch and stays.
So do dequantized weights, whatever they cost: who quantized them wants the memory.

Kept buffers are memory that a call without them would need for a moment only. Peak memory is to
stay within 1.1 times that of eager PyTorch, and what a call holds anyway (arguments, and the
intermediates alive at its worst point) is about that much: so a part of it is the budget. Of what
does not fit, those buffers are left out that save the least time per byte. Small buffers, as those
of one number per channel, always fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ...dtypes import Kind
from ...ir.at_sizes import symbols_of_parts
from ...ir.buffers import Buffer, BufferOrigin
from ...ir.graph import GraphOutput, LoopGraph, Program
from ...ir.nodes import Contraction, HostCall, Pointwise, bodies_of, inputs_of, outputs_of
from ...ir.scalar import Const
from ...ir.spaces import Node
from ...symbolic.sizes import product, typical
from ...target import Target
from .. import cost
from .inline import body_cost


def hoist_parameter_work(graph: LoopGraph, target: Target) -> Program[LoopGraph]:
    """The graph of every call, and the graph of the work on parameters, done once for many calls.

    The second graph computes from static inputs and constants alone. Its results, in order, are the
    buffers of origin PREPARED of the first graph.
    """
    chosen = _within_budget(graph, _static_nodes(graph), target)
    if not chosen:
        return Program(graph)
    nodes = tuple(node for node in graph.nodes if _is_in(node, chosen))
    rest = tuple(node for node in graph.nodes if not _is_in(node, chosen))
    kept = _kept(graph, chosen)
    read = {name for node in nodes for name in inputs_of(node)}
    preparation = replace(
        graph,
        name=f"{graph.name}_preparation",
        nodes=nodes,
        inputs=tuple(spec for spec in graph.inputs if spec.buffer in read),
        outputs=tuple(_whole(graph.buffers[name]) for name in kept),
    )
    prepared = {name: replace(graph.buffers[name], origin=BufferOrigin.PREPARED) for name in kept}
    called = replace(graph, nodes=rest, buffers=graph.buffers | prepared)
    return Program(called.live(), preparation.live())


def _is_in(node: Node, chosen: Mapping[str, Node]) -> bool:
    return any(name in chosen for name in outputs_of(node))  # a host call may have no output


def _whole(buffer: Buffer) -> GraphOutput:
    return GraphOutput(buffer.name, buffer.sizes, buffer.strides, buffer.offset)


# -- what can be prepared --------------------------------------------------------------------------


def static_buffers(graph: LoopGraph) -> set[str]:
    """Buffers that are the same in every call, as long as no static input changes."""
    return _given(graph).union(_static_nodes(graph))


def _given(graph: LoopGraph) -> set[str]:
    """Static inputs that the graph does not change, and constants."""
    changed = {graph.inputs[o.mutates] for o in graph.outputs if o.mutates is not None}
    same = {
        spec.buffer
        for spec in graph.inputs
        if spec.buffer is not None and spec.static and spec not in changed
    }
    return same | set(graph.constants)


def _static_nodes(graph: LoopGraph) -> dict[str, Node]:
    """Nodes that compute the same as long as no static input changes, by each of their outputs.

    Not those of results: callers own these, and may change them. Not host calls: they may be
    random. Not buffers of one value, which are there to be changed: a kept one would be copied
    first, which costs more than to write it.
    """
    same = _given(graph)
    found: dict[str, Node] = {}
    for node in graph.nodes:
        if isinstance(node, HostCall):
            continue
        reads, outputs = inputs_of(node), outputs_of(node)
        if not graph.returned.isdisjoint(outputs) or not same.issuperset(reads):
            continue
        if isinstance(node, Pointwise) and isinstance(node.body, Const):
            continue
        read, written = ([graph.buffers[n] for n in names] for names in (reads, outputs))
        if any(_is_dequantized(buffer, read) for buffer in written):
            continue
        if _has_constant_sizes(node, (*read, *written)):
            found.update(dict.fromkeys(outputs, node))
            same.update(outputs)
    return found


def _is_dequantized(buffer: Buffer, read: Iterable[Buffer]) -> bool:
    """Whether a buffer of floats is unpacked from half of its bytes, or less.

    Of each integer that is read, at most eight elements: not of positions, say, rows of a table.
    """
    numel, nbytes = typical(buffer.numel), _nbytes_of(buffer)
    return buffer.dtype.is_float and any(
        b.dtype.kind in (Kind.SIGNED, Kind.UNSIGNED)
        and 8 * typical(b.numel) >= numel
        and 2 * _nbytes_of(b) <= nbytes
        for b in read
    )


def _has_constant_sizes(node: Node, buffers: Sequence[Buffer]) -> bool:
    """Whether nothing about a node depends on the sizes of a call, and its result is not empty."""
    # A size symbol has no extent.
    is_known = all(symbol.extent is not None for symbol in symbols_of_parts((node, *buffers)))
    return is_known and buffers[-1].numel.constant > 0


# -- what is worth its memory ----------------------------------------------------------------------


def _kept(graph: LoopGraph, chosen: Mapping[str, Node]) -> list[str]:
    """Results of the chosen nodes that others read."""
    read = set().union(*(inputs_of(node) for node in graph.nodes if not _is_in(node, chosen)))
    return [name for name in chosen if name in read]


def _within_budget(graph: LoopGraph, chosen: dict[str, Node], target: Target) -> dict[str, Node]:
    """The nodes whose results that are kept fit into the budget."""
    if not chosen:
        return chosen
    held = _held_nbytes(graph)
    while True:
        # What nothing reads any more is not worth computing once.
        kept = _kept(graph, chosen)
        chosen = _needed(chosen, kept)
        sizes = {name: _nbytes_of(graph.buffers[name]) for name in kept}
        large = [name for name in kept if not cost.is_small_buffer(sizes[name], target)]
        if cost.may_be_kept(sum(sizes[name] for name in large), held, target):
            return chosen
        saved = {name: _saved(chosen[name], graph, target) / sizes[name] for name in large}
        chosen = _without(chosen, min(large, key=saved.__getitem__))


def _without(chosen: Mapping[str, Node], name: str) -> dict[str, Node]:
    """The nodes that do not need this one's result."""
    left: dict[str, Node] = {}
    gone = {name}
    for output, node in chosen.items():
        if not gone.isdisjoint((*outputs_of(node), *inputs_of(node))):
            gone.add(output)
        else:
            left[output] = node
    return left


def _needed(chosen: Mapping[str, Node], kept: Iterable[str]) -> dict[str, Node]:
    """The nodes that kept results are computed from."""
    needed = set(kept)
    for output, node in reversed(list(chosen.items())):
        if output in needed:
            needed.update(inputs_of(node))
    return {output: node for output, node in chosen.items() if output in needed}


def _saved(node: Node, graph: LoopGraph, target: Target) -> float:
    """The time that a call does not spend in a node, as bytes of memory traffic."""
    names = (*inputs_of(node), *outputs_of(node))
    moved = sum(_nbytes_of(graph.buffers[name]) for name in names)
    work = sum(body_cost(body) for body in bodies_of(node)) + isinstance(node, Contraction)
    points = max(1, product(node.extents).constant)
    return cost.node_nbytes(moved, work * points, target)


# -- how much memory a graph needs ----------------------------------------------------------------


def _nbytes_of(buffer: Buffer) -> int:
    """Bytes of a buffer, of which symbolic sizes count as small ones."""
    return typical(buffer.nbytes)


def _alive_nbytes(graph: LoopGraph) -> int:
    """The most bytes of nodes' results that are alive at a node."""
    last: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        last.update(dict.fromkeys((*inputs_of(node), *outputs_of(node)), at))
    last.update(dict.fromkeys(graph.returned, len(graph.nodes)))
    changes = [0] * (len(graph.nodes) + 2)
    for at, node in enumerate(graph.nodes):
        for name in outputs_of(node):
            nbytes = _nbytes_of(graph.buffers[name])
            changes[at] += nbytes
            changes[last[name] + 1] -= nbytes
    return max(accumulate(changes))


def _held_nbytes(graph: LoopGraph) -> int:
    """The peak memory of a call: its arguments, and the most that other buffers ever take."""
    given = [spec.buffer for spec in graph.inputs if spec.buffer is not None]
    arguments = sum(_nbytes_of(graph.buffers[name]) for name in (*given, *graph.constants))
    return arguments + _alive_nbytes(graph)
