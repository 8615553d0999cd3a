"""Operators that update a part of an argument that the graph changes.

``cache[:, :, p : p + 1] = k`` is ``copy_(cache, slice_scatter(cache, k, 2, p, p + 1))``.
As a scatter it writes the slice alone, in place; anywhere else a slice is replaced by a predicate,
which fuses with what reads it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

aten = torch.ops.aten

_UPDATES = frozenset(
    {
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.index_put.default,
        aten.index_copy.default,
        aten.index_add.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
    }
)


def argument_updates(graph: Graph) -> frozenset[FxNode]:
    """The nodes from each changed argument to its new value, where every one is an update."""
    found: set[FxNode] = set()
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        argument, node = copy.args[0], copy.args[1]
        chain: set[FxNode] = set()
        while isinstance(node, FxNode) and node.target in _UPDATES:
            chain.add(node)
            if _reads(node.args[1:], argument):
                break  # a part of the old contents moves: not possible in place
            node = node.args[0]
        if node is argument:
            found |= chain
    return frozenset(found)


def _reads(arguments: object, argument: object) -> bool:
    """Whether the source of an update is a changed view of the argument: ``cache[0][:, p] = k``."""
    if isinstance(arguments, FxNode):
        is_update = arguments.target in _UPDATES
        return is_update and _is_view_of(arguments.args[0], argument)
    if isinstance(arguments, (tuple, list)):
        return any(_reads(item, argument) for item in arguments)
    return False


def _is_view_of(node: object, argument: object) -> bool:
    while isinstance(node, FxNode) and node is not argument and node.args:
        node = node.args[0]
    return node is argument
