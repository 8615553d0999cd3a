"""What several passes of capture ask of an FX graph, and do to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..torch_private import FakeTensor, FakeTensorMode, _LazyGraphModule, tree_leaves


def values_of(graph: Graph) -> Iterator[Any]:
    """What the nodes of a traced graph give: fake tensors, symbolic and other numbers."""
    for node in graph.nodes:
        yield from tree_leaves(node.meta.get("val"))


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """That of the tensors; None for a graph that computes numbers only."""
    return next((v.fake_mode for v in values_of(graph) if isinstance(v, FakeTensor)), None)


def add_argument(graph: Graph, name: str, value: Any) -> Node:
    """The placeholder of one more argument, the last one, which is like ``value``."""
    arguments = graph.find_nodes(op="placeholder")
    before = arguments[-1].next if arguments else next(iter(graph.nodes))
    with graph.inserting_before(before):
        node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def copy_of(module: GraphModule) -> GraphModule:
    """A graph for PyTorch to run, whatever becomes of this one."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _LazyGraphModule(module, graph)  # few of them will be called


def memory_like(tensor: Tensor) -> Tensor:
    """A new tensor with the layout of another one, from the start of its memory."""
    layout = tensor.shape, tensor.stride()
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)


def attribute_of(module: GraphModule, node: Node) -> Any:
    """What a ``get_attr`` node gives: a constant, or the graph of a function."""
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value
