"""What a backward graph computes again instead of being given it, and what it has to be given."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from ...torch_private import OpOverload
from ..patches.fusible_operators import VIEWS

aten = torch.ops.aten

# Beside elementwise ones: what makes or looks at tensors without arithmetic.
_OF_MASKS = frozenset(
    {aten.view, aten.expand, aten.unsqueeze, aten.squeeze, aten.permute, aten.slice, aten.select}
    | {aten.arange, aten.full, aten.scalar_tensor, aten._to_copy, aten.index, *VIEWS}
)
_LARGER = 8


def split_log_softmax(graph: torch.fx.GraphModule) -> int:
    """Writes, in a joint graph, log_softmax as what it is computed from; how many there were.

    The backward graph then needs x and two numbers of each row, not the result. It is as large as
    x, which is there anyway where it is returned beside a loss, as logits are.
    """
    count = 0
    for node in graph.graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        x, dim, _ = node.args
        value, result = x.meta["val"], node.meta["val"]
        # A maximum needs elements.
        if value.dim() == 0 or not isinstance(value.shape[dim], int) or value.shape[dim] == 0:
            continue

        def call(target: Any, *arguments: Any, of: Node = node, **options: Any) -> Node:
            made = graph.graph.call_function(target, arguments, options)
            made.meta = {k: v for k, v in of.meta.items() if k not in ("val", "tensor_meta")}
            values = [a.meta["val"] if isinstance(a, Node) else a for a in arguments]
            made.meta["val"] = target(*values, **options)
            return made

        with graph.graph.inserting_before(node):
            dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
            if value.dtype is not dtype:
                x = call(aten._to_copy.default, x, dtype=dtype)
            shifted = call(aten.sub.Tensor, x, call(aten.amax.default, x, [dim], True))
            exponentials = call(aten.exp.default, shifted)
            total = call(aten.sum.dim_IntList, exponentials, [dim], True)
            made = call(aten.sub.Tensor, shifted, call(aten.log.default, total))
            if result.dtype is not dtype:
                made = call(aten._to_copy.default, made, dtype=result.dtype)
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
        count += 1
    if count:
        graph.recompile()
    return count


def recompute_constants(graph: torch.fx.GraphModule) -> int:
    """Marks, in a joint graph, what depends on no tensor: masks, positions, tables; how much.

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
            _prefer_recompute(node)
    return len(computed)


def recompute_masks(graph: torch.fx.GraphModule) -> int:
    """Marks, in a joint graph, what attention's masks are computed from, if that is much smaller.

    Gradients then compute a mask of documents again, of the documents' numbers, for each score that
    they compute again.
    """
    target, count = torch.ops.webgpu.attention_backward.default, 0
    for node in graph.graph.find_nodes(op="call_function", target=target):
        for mask in node.all_input_nodes[4:]:
            computed, given = _computed_of_elements(mask)
            if computed and _LARGER * sum(map(_size, given)) <= _size(mask):
                count += len(computed)
                for part in computed:
                    _prefer_recompute(part)
    return count


def _computed_of_elements(node: Node) -> tuple[set[Node], set[Node]]:
    """The elementwise operators, views and gathers that a node is made of, and their tensors."""
    computed: set[Node] = set()
    given: set[Node] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if part in computed or part in given or not _is_tensor(part):
            continue
        if _is_of_elements(part):
            computed.add(part)
            waiting += part.all_input_nodes
        else:
            given.add(part)
    return computed, given


def _is_of_elements(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or _is_random(node):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _OF_MASKS


def _size(node: Node) -> int:
    from ...torch_private import _size_of  # eager calls have no use for its module, and would wait

    value = node.meta["val"]
    return int(_size_of(node)) if isinstance(value, torch.Tensor) else 0


def _prefer_recompute(node: Node) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = 0  # the partitioner asks for it beside the policy


def _is_tensor(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def _is_random(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    return torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten"


def keep_seeds(graph: torch.fx.GraphModule) -> int:
    """Makes the partitioner save seeds, so that a backward graph computes equal numbers again."""
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.webgpu.seed.default)
    for node in nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return len(nodes)
