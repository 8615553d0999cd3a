"""Equal calls of a joint graph, made once. PyTorch does that, too, but loads Inductor for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...node_text import Unreadable, argument_text, storage_of
from ...torch_private import OpOverload
from ..control_flow.calls import unbacked_in
from ..tracing import is_random


def merge_common_calls(module: GraphModule) -> int:
    """Lets earlier calls stand for later ones of the same arguments; how many there were.

    Results of the graph stay apart, and so does what shares their memory: nothing that is done to
    one of them may be seen in another. Behind a node that changes a tensor nothing is known.
    """
    (output,) = module.graph.find_nodes(op="output")
    returned = set(map(_storage, output.all_input_nodes)) - {None}
    known: dict[object, Node] = {}
    count = 0
    for node in module.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            known.clear()
        elif _is_repeatable(node) and _storage(node) not in returned:
            try:
                arguments = argument_text((node.args, dict(node.kwargs)))
            except Unreadable:
                continue
            first = known.setdefault((node.target, arguments), node)
            if first is not node:
                node.replace_all_uses_with(first)
                module.graph.erase_node(node)
                count += 1
    if count:
        module.recompile()
    return count


def _is_repeatable(node: Node) -> bool:
    """Whether a second call gives the same: no memory as it is, random number or new symbol."""
    if node.op != "call_function" or is_random(node) or unbacked_in(node.meta.get("val")):
        return False
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket is not torch.ops.aten.empty
    return getattr(node.target, "__module__", "") == "_operator"


def _storage(node: Node) -> int | None:
    value = node.meta.get("val")
    try:
        return storage_of(value) if isinstance(value, Tensor) else None
    except NotImplementedError:  # it has none
        return None
