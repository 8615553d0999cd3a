"""The seeds of a graph's random operators (``webgpu::seed``), which each call draws anew."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten


def keep_seeds(graph: torch.fx.GraphModule) -> None:
    """Makes the partitioner save seeds, so that a backward graph computes equal numbers again."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def take_seeds(graph: torch.fx.GraphModule) -> int:
    """Turns a graph's seeds into one more argument, int32 (number of seeds, 2); the number."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default)
    if not nodes:
        return 0
    like = nodes[0].meta["val"]
    arguments = graph.graph.find_nodes(op="placeholder")
    before = arguments[-1].next if arguments else next(iter(graph.graph.nodes))
    with graph.graph.inserting_before(before):
        seeds = graph.graph.placeholder("seeds")
    with like.fake_mode:
        seeds.meta["val"] = torch.empty((len(nodes), 2), dtype=torch.int32)
        row = torch.empty((2,), dtype=torch.int32)
    for index, node in enumerate(nodes):
        with graph.graph.inserting_before(node):
            taken = graph.graph.call_function(aten.select.int, (seeds, 0, index))
        taken.meta = {**node.meta, "val": row}
        node.replace_all_uses_with(taken)
        graph.graph.erase_node(node)
    graph.recompile()
    return len(nodes)
