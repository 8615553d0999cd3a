"""What a backward graph computes again instead of being given it, and what it has to be given."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy


def recompute_constants(graph: torch.fx.GraphModule) -> None:
    """Marks, in a joint graph, what depends on no tensor: masks, positions, tables.

    Computing it costs a kernel little that would have to load it; and only where it is computed is
    it known what it says, as that a mask is causal.
    """
    computed: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or _is_random(node):
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if all(n in computed for n in node.all_input_nodes if _is_tensor(n)):
            computed.add(node)
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0  # the partitioner asks for it beside the policy


def _is_tensor(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def _is_random(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten"


def keep_seeds(graph: torch.fx.GraphModule) -> None:
    """Makes the partitioner save seeds, so that a backward graph computes equal numbers again."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
