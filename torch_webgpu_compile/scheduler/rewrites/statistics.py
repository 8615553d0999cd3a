"""Statistics of a single row, computed again by every workgroup that needs them.

A product with a normalised token, the sum of w[n, k] · (g[k] · x[k] · scale(sum of x²)), is
two kernels: the statistic needs all of x before the first product. But the scale does not depend on
k: scale · (sum of w[n, k] · g[k] · x[k]) needs both sums at the end only. Every row n then sums x²
beside its products, from values that it loads anyway, and a dispatch of one workgroup disappears.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ... import dtypes
from ...ir.buffers import intermediate
from ...ir.graph import LoopGraph
from ...ir.nodes import Pointwise, Reduction, inputs_of, outputs_of
from ...ir.scalar import Load, Op, Scalar, apply, index, loads_of, rewrite, scalar_symbols
from ...ir.spaces import Node, numbered
from ...symbolic.sizes import ONE, Expr, magnitude, product
from .. import cost
from ..mapping import point_of
from .inline import inline_into

# Nodes between a statistic and the sums that use it.
_MOST_STEPS = 8


def recompute_statistics(graph: LoopGraph) -> LoopGraph:
    """The graph in which products with a normalised row compute the row's statistic themselves.

    A sum of values that are scaled by a statistic of a single row is replaced by three nodes: the
    statistic, the sum of unscaled values and its scaling. This is done where every reader of the
    statistic is such a sum.
    """
    state = _Nodes(graph)
    order = list(state.nodes)
    for name in order:
        node = state.nodes.get(name)
        if isinstance(node, Reduction) and _is_statistic(node, graph):
            state.move(node)
    # A replaced sum is three nodes under its name: the statistic, the sum and its scaling.
    keys = (key for name in order for key in (f"{name}_statistic", f"{name}_unscaled", name))
    nodes = tuple(state.nodes[key] for key in keys if key in state.nodes)
    return (
        graph if nodes == graph.nodes else replace(graph, nodes=nodes, buffers=state.buffers).live()
    )


def _is_statistic(node: Reduction, graph: LoopGraph) -> bool:
    length = magnitude(product(node.reduce_ranges))
    return (
        product(node.ranges) is ONE
        and len(node.reduce_ranges) == 1
        and length is not None
        and cost.stays_in_caches(length)
        and node.output not in graph.returned
    )


class _Nodes:
    """The nodes of a graph, by their first outputs, which change while statistics are moved."""

    def __init__(self, graph: LoopGraph) -> None:
        self.nodes = {outputs_of(node)[0]: node for node in graph.nodes}
        self.buffers = dict(graph.buffers)
        self.returned = graph.returned
        self.readers: dict[str, list[str]] = defaultdict(list)
        for name, reader in self.nodes.items():
            for buffer in inputs_of(reader):
                self.readers[buffer].append(name)

    def _readers(self, name: str) -> list[str]:
        """The nodes that read a buffer now; replaced nodes are still listed in ``readers``."""
        found = dict.fromkeys(self.readers[name])
        return [r for r in found if r in self.nodes and name in inputs_of(self.nodes[r])]

    def move(self, statistic: Reduction) -> None:
        """Gives every sum that uses a statistic its own copy, or changes none of them."""
        inner = self._between(statistic.output)
        if inner is None:
            return
        sums: dict[str, Reduction] = {}
        for name in inner:
            for reader in self._readers(name):
                if reader not in inner:
                    found = self._inlined(reader, statistic.reduce_ranges, inner)
                    if found is None:
                        return
                    sums[reader] = found
        split = {name: _factors(found.body, statistic.output) for name, found in sums.items()}
        if not sums or any(pair is None for pair in split.values()):
            return
        statistic = self._with_operands(statistic)
        copies: dict[tuple[Expr, ...], str] = {}
        for name in list(self.nodes):  # in order, as the first one of a space makes its statistic
            pair = split.get(name)
            if pair is not None:
                copy = copies.setdefault(sums[name].ranges, f"{name}_statistic")
                self._replace(sums[name], statistic, copy, *pair)
        for name in inner:
            del self.nodes[name]

    def _with_operands(self, statistic: Reduction) -> Reduction:
        """Squares and the like that only the statistic reads are computed where it is."""
        for name in inputs_of(statistic):
            producer = self.nodes.get(name)
            own = self._readers(name) == [statistic.output] and name not in self.returned
            if own and isinstance(producer, Pointwise):
                inlined = inline_into(statistic, producer)
                if isinstance(inlined, Reduction):
                    statistic = inlined
                    del self.nodes[name]
        return statistic

    def _between(self, statistic: str) -> list[str] | None:
        """The statistic and the pointwise nodes that use it; None if they are needed elsewhere."""
        inner = [statistic]
        for name in inner:
            if len(inner) > _MOST_STEPS or name in self.returned:
                return None
            for reader in self._readers(name):
                if isinstance(self.nodes[reader], Pointwise) and reader not in inner:
                    inner.append(reader)
        return inner

    def _inlined(self, name: str, elements: tuple[Expr, ...], inner: list[str]) -> Reduction | None:
        """A sum over the statistic's elements, with the nodes in between inlined."""
        node: Node | None = self.nodes[name]
        if not isinstance(node, Reduction) or (node.kind, node.reduce_ranges) != ("sum", elements):
            return None
        rows = magnitude(product(node.ranges))
        if rows is None or not cost.makes_statistics_again(rows):
            return None
        for producer in reversed(inner[1:]):
            between = self.nodes[producer]
            assert isinstance(between, Pointwise)
            node = None if node is None else inline_into(node, between)
        return node if isinstance(node, Reduction) else None

    def _replace(
        self, node: Reduction, statistic: Reduction, copy: str, scale: Scalar, rest: Scalar
    ) -> None:
        """``scale`` · (sum of ``rest``), with a copy of the statistic for each row."""
        ranges, name = node.ranges, node.output
        unscaled = f"{name}_unscaled"
        self._add(replace(statistic, output=copy, ranges=ranges))
        self._add(replace(node, output=unscaled, body=rest))
        here = tuple(index(i) for i in point_of(numbered("i", ranges)))

        def own(part: Scalar) -> Scalar | None:
            is_statistic = isinstance(part, Load) and part.buffer == statistic.output
            return Load(copy, here, statistic.body.dtype) if is_statistic else None

        total = Load(unscaled, here, rest.dtype)
        body = apply("mul", total, rewrite(scale, own))
        self._add(Pointwise(name, ranges, body, origins=node.origins))

    def _add(self, node: Reduction | Pointwise) -> None:
        """Adds a node, or puts it in the place of one, with its buffer."""
        name = node.output
        self.nodes[name] = node
        if name not in self.buffers:
            self.buffers[name] = intermediate(name, node.body.dtype, node.ranges)
        for buffer in inputs_of(node):
            self.readers[buffer].append(name)


def _factors(body: Scalar, statistic: str) -> tuple[Scalar, Scalar] | None:
    """(factor that depends on nothing but the statistic, the rest) of a product, or None."""
    scales: list[Scalar] = []
    others: list[Scalar] = []
    stack = [body]
    while stack:
        part = stack.pop()
        if isinstance(part, Op) and part.name == "mul":
            stack += reversed(part.args)
            continue
        loads = {load.buffer for load in loads_of(part)}
        if statistic not in loads:
            others.append(part)
        elif (unrounded := _unrounded(part)) is not None:
            stack.append(unrounded)
        elif loads == {statistic} and not scalar_symbols(part):
            scales.append(part)
        else:
            return None
    if len(scales) != 1 or not others:
        return None
    rest = others[0]
    for part in others[1:]:
        rest = apply("mul", rest, part)
    return scales[0], rest


def _unrounded(part: Scalar) -> Scalar | None:
    """The 32-bit value that was rounded to a narrower float and widened again; None if it is none.

    Kernels do not round on the way either: only what is stored is in 16 bits.
    """
    match part:
        case Op("cast", (Op("cast", (wide,), narrow),), dtypes.float32):
            return wide if narrow.is_float and wide.dtype is dtypes.float32 else None
    return None
