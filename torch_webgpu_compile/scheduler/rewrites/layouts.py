"""Channels-last layouts of intermediates, so that convolutions access full vectors.

Lowering makes every intermediate contiguous: images are [N, C, H, W] in memory. Four neighbours
along the inner dimension of a convolution (its taps and input channels) are then four loads.
Channels-last, [N, H, W, C], makes them one.

Buffers that are read or written side by side share their layout, or a kernel walks through one of
them against the grain. So the choice is made for sets of buffers that pointwise nodes and windowed
reductions connect, by what the two layouts cost all nodes that touch the set. Inputs and outputs of
the graph keep the layout that PyTorch gave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ...ir.access import VECTOR, address_of, load_index, step_of
from ...ir.buffers import Buffer, BufferOrigin
from ...ir.depthwise_nodes import DepthwiseConvolution
from ...ir.graph import LoopGraph
from ...ir.nodes import (
    Contraction,
    Pointwise,
    Reduction,
    bodies_of,
    inputs_of,
    outputs_of,
    taken_whole,
)
from ...ir.scalar import Scalar, loads_of, scalar_symbols, substitute_symbols
from ...ir.spaces import Node, numbered, symbol_keys, symbols_in
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    contiguous_strides,
    linearize,
    product,
    symbols_of,
    typical,
)
from ...target import Target
from .. import cost
from ..mapping import point_of
from .convolutions import (
    Convolution,
    WeightCopies,
    reads_channels,
    reads_positions,
    recognise,
    stores_positions,
    strides_in,
    written_for,
)

StridesOf = dict[str, tuple[Expr, ...]]


def choose_layouts(graph: LoopGraph, target: Target) -> LoopGraph:
    """The graph with channels-last intermediates where that pays, and convolutions to match."""
    found = [recognise(node) for node in graph.nodes if isinstance(node, Contraction)]
    convolutions = {c.node.output: c for c in found if c is not None}
    if not convolutions:
        return graph
    last = _choose(graph, convolutions, target)
    buffers = {
        name: replace(buffer, strides=channels_last(buffer.sizes)) if name in last else buffer
        for name, buffer in graph.buffers.items()
    }
    copies = WeightCopies(buffers)
    nodes: list[Node] = []
    for node in graph.nodes:
        convolution = convolutions.get(outputs_of(node)[0]) if outputs_of(node) else None
        if convolution is not None:
            turn = _is_channels_last(buffers[convolution.node.output])
            nodes += written_for(convolution, buffers, copies, turn, target)
        elif isinstance(node, Reduction):
            nodes.append(_in_memory_order(node, buffers, last))
        else:
            nodes.append(node)
    return graph.with_nodes(tuple(nodes), buffers)


def channels_last(sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    """Strides with dimension 1 fastest."""
    return strides_in([0, *range(2, len(sizes)), 1], sizes)


def _has_layouts(buffer: Buffer) -> bool:
    """Whether channels-last differs from contiguous and is made of full vectors."""
    if len(buffer.sizes) < 3 or all(size is ONE for size in buffer.sizes[2:]):
        return False
    channels = buffer.sizes[1]
    return channels.divisor % VECTOR == 0 and channels is not ZERO


def _is_channels_last(buffer: Buffer) -> bool:
    return _has_layouts(buffer) and buffer.strides == channels_last(buffer.sizes)


# -- the choice ------------------------------------------------------------------------------------


def _choose(graph: LoopGraph, convolutions: Mapping[str, Convolution], target: Target) -> set[str]:
    """Names of the buffers that become channels-last."""
    free = _free_buffers(graph)
    strides: StridesOf = {name: buffer.strides for name, buffer in graph.buffers.items()}
    touching: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in (*inputs_of(node), *outputs_of(node)):
            touching.setdefault(name, []).append(node)
    chosen: set[str] = set()
    for group in _connected(graph, free, convolutions):
        nodes = {id(node): node for name in group for node in touching.get(name, ())}
        trial = strides | {name: channels_last(graph.buffers[name].sizes) for name in group}
        before = after = 0.0
        for node in nodes.values():
            convolution = convolutions.get(outputs_of(node)[0])
            before += _cost(node, convolution, graph.buffers, strides, target)
            after += _cost(node, convolution, graph.buffers, trial, target)
        if after <= before:  # of equals: positions of all images are rows together
            chosen |= group
            strides = trial
    return chosen


def _free_buffers(graph: LoopGraph) -> set[str]:
    """Intermediates whose layout nothing outside of kernels depends on."""
    free = set()
    fixed = set(graph.returned)
    for node in graph.nodes:
        fixed.update(taken_whole(node))
        if isinstance(node, Pointwise | Reduction | Contraction | DepthwiseConvolution):
            free.add(node.output)
    return {
        name
        for name in free - fixed
        if _has_layouts(graph.buffers[name])
        and graph.buffers[name].origin is BufferOrigin.INTERMEDIATE
        and graph.buffers[name].strides == contiguous_strides(graph.buffers[name].sizes)
    }


def _connected(
    graph: LoopGraph, free: set[str], convolutions: Mapping[str, Convolution]
) -> list[set[str]]:
    """Sets of free buffers of images, each connected by nodes that go through them in step."""
    groups: dict[str, set[str]] = {}
    for convolution in convolutions.values():
        for name in (convolution.node.output, *(o.buffer for o in convolution.images)):
            if name in free:
                groups.setdefault(name, {name})
    # Forwards and backwards until nothing joins: what is computed from images is images.
    links = [link for node in graph.nodes for link in _links(node, free)]
    changed = True
    while changed:
        changed = False
        for link in (*links, *reversed(links)):
            known = [groups[name] for name in link if name in groups]
            if not known or all(groups.get(name) is known[0] for name in link):
                continue
            merged: set[str] = set(link).union(*known)
            groups.update(dict.fromkeys(merged, merged))
            changed = True
    return list({id(group): group for group in groups.values()}.values())


def _links(node: Node, free: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs of buffers that a node goes through with the same channel."""
    match node:
        case Pointwise(body=body) | Reduction(body=body):
            symbols = numbered("i", node.ranges)
        case DepthwiseConvolution(image=body):
            symbols = symbol_keys(node.symbols)
        case _:
            return
    if node.output not in free:
        return
    for load in loads_of(body):
        index = load_index(load)
        if load.buffer in free and index is not None and len(index) == len(symbols):
            others = (index[0], *index[2:])
            alone = all(symbols[1] not in symbols_of(entry) for entry in others)
            if alone and step_of(index[1], symbols[1]) == 1:
                yield load.buffer, node.output


# -- what a layout costs ---------------------------------------------------------------------------


def _cost(
    node: Node,
    convolution: Convolution | None,
    buffers: Mapping[str, Buffer],
    strides: StridesOf,
    target: Target,
) -> float:
    """Extra memory traffic, in bytes, that the buffers' layouts cause in a node."""
    match node:
        case Pointwise() | Reduction():
            points = point_of(numbered("i", node.ranges))
            output = linearize(points, strides[node.output])
            accesses = [
                (output, _nbytes(node.output, buffers)),
                *_reads(node.body, buffers, strides),
            ]
            symbols = _moving(symbols_in(node.spaces["body"]))
            return cost.against_the_grain_nbytes(_least_against(accesses, symbols))
        case Contraction() if convolution is not None:
            return _convolution_cost(convolution, buffers, strides, target)
        case _:
            total = 0.0
            for body in bodies_of(node):
                reads = list(_reads(body, buffers, strides))
                total += _least_against(reads, _moving(scalar_symbols(body)))
            return cost.against_the_grain_nbytes(total)


def _convolution_cost(
    convolution: Convolution, buffers: Mapping[str, Buffer], strides: StridesOf, target: Target
) -> float:
    node = convolution.node
    total = 0.0
    if not (reads_channels(convolution, strides) or reads_positions(convolution, strides)):
        inner = typical(product(node.inner))
        flops = 2 * inner * typical(buffers[node.output].numel)
        total += cost.scalar_operand_nbytes(flops, target)
    output = buffers[node.output]
    turns = _has_layouts(output) and strides[node.output] == channels_last(output.sizes)
    if not turns and not stores_positions(node, strides[node.output]):
        total += _nbytes(node.output, buffers)
    return total


def _nbytes(name: str, buffers: Mapping[str, Buffer]) -> int:
    return typical(buffers[name].numel) * buffers[name].dtype.itemsize


def _reads(
    body: Scalar, buffers: Mapping[str, Buffer], strides: StridesOf
) -> Iterator[tuple[Expr, int]]:
    """(address, bytes of the buffer) of every load."""
    for load in loads_of(body):
        yield address_of(load, strides[load.buffer]), _nbytes(load.buffer, buffers)


def _moving(symbols: Iterable[Symbol]) -> list[Symbol]:
    """The symbols that take several values in one kernel: neither sizes nor indices of one."""
    return [s for s in symbols if s.extent is not None and s.extent is not ONE]


def _least_against(accesses: Sequence[tuple[Expr, int]], symbols: Sequence[Symbol]) -> int:
    """Bytes of the accesses that do not go by single steps along the best symbol to go along."""
    return min(
        (
            sum(nbytes for address, nbytes in accesses if step_of(address, symbol) > 1)
            for symbol in symbols
        ),
        default=0,
    )


# -- reductions ------------------------------------------------------------------------------------


def _in_memory_order(node: Reduction, buffers: Mapping[str, Buffer], last: set[str]) -> Reduction:
    """A reduction over channels as well as positions, with the channels fastest.

    Not of positions themselves: the first of equals would be another.
    """
    if node.kind in ("argmin", "argmax"):
        return node
    elements = numbered("r", node.reduce_ranges)
    loads = [o for o in loads_of(node.body) if o.buffer in last]
    if not loads or len(elements) < 2:
        return node
    largest = max(loads, key=lambda o: _nbytes(o.buffer, buffers))
    address = address_of(largest, buffers[largest.buffer].strides)
    fastest = next((s for s in elements if step_of(address, s) == 1), None)
    if fastest is None or fastest is elements[-1]:
        return node
    order = [*(s for s in elements if s is not fastest), fastest]
    sizes = tuple(s.extent for s in order if s.extent is not None)
    new = dict(zip(order, point_of(numbered("r", sizes)), strict=True))
    return replace(node, reduce_ranges=sizes, body=substitute_symbols(node.body, new))
