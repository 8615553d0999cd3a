"""Questions about the nodes of an FX graph and their values."""

from __future__ import annotations

import operator
import re
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from ..node_text import storage_of
from ..torch_ops.assertions import ASSERTIONS

aten = torch.ops.aten

_EFFECTS = (aten.copy_.default, *ASSERTIONS, torch.ops.higher_order.with_effects)


def needed_nodes(graph: torch.fx.Graph) -> set[FxNode]:
    """Nodes that outputs, mutations and other effects depend on."""
    live: set[FxNode] = set()
    stack = [n for n in graph.nodes if n.op == "output" or n.target in _EFFECTS]
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def used_results(node: FxNode) -> frozenset[int] | None:
    """Which results of a node with several are needed; None if the whole tuple is."""
    used = set()
    for user in node.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], int):
            return None
        if user.users:
            used.add(user.args[1])
    return frozenset(used)


def shared_storages(graph: Graph) -> set[int]:
    """The memory that is made in a graph and of which several of its outputs are views."""
    arguments = graph.find_nodes(op="placeholder")
    given = {storage_of(fake) for node in arguments for fake in _strided(node)}
    (returned,) = graph.find_nodes(op="output")[0].args
    items = returned if isinstance(returned, (tuple, list)) else (returned,)
    nodes = dict.fromkeys(item for item in items if isinstance(item, FxNode))
    found = Counter(storage_of(fake) for node in nodes for fake in _strided(node))
    return {storage for storage, count in found.items() if count > 1} - given


def _strided(node: FxNode) -> list[torch.Tensor]:
    fake = node.meta.get("val")
    if isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
        return [fake]
    return []


def identifier(name: str) -> str:
    """A name with nothing but letters, digits and underscores."""
    return re.sub(r"\W", "_", name)


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous NumPy array of the same bits: bfloat16 as uint16, floats of 8 bits as uint8."""
    tensor = tensor.contiguous()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8).numpy().copy()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16).copy()
    return tensor.numpy().copy()


# Operators that update a part of an argument: ``cache[:, :, p : p + 1] = k`` is
# ``copy_(cache, slice_scatter(cache, k, 2, p, p + 1))``. As a scatter it writes the slice alone, in
# place; where no argument changes, a slice is replaced by a predicate, which fuses with its reader.
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
