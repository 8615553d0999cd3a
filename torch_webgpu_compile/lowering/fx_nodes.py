"""Questions about the nodes of an FX graph and their values."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import torch
from torch.fx import Node as FxNode

_EFFECTS = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.higher_order.with_effects,
)


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


def has_tensor(value: Any) -> bool:
    """Whether a tensor is anywhere in nested arguments."""
    if isinstance(value, (tuple, list)):
        return any(has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def flatten(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in flatten(item)]
    return [value]


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
