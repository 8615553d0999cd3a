"""Attention of few queries over many keys: parts of the keys in workgroups of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import dtypes
from ...ir.attention_nodes import Attention
from ...ir.buffers import Buffer, intermediate
from ...ir.graph import LoopGraph
from ...ir.nodes import Pointwise, Reduction
from ...ir.scalar import Load, Scalar, apply, cast, const, index
from ...ir.spaces import Node, iteration_symbols
from ...symbolic.sizes import IntLike, as_expr, magnitude, upper_bound
from ...target import Target
from .. import cost


def split_attention(graph: LoopGraph, target: Target) -> LoopGraph:
    """Replaces attention with too few workgroups by its parts, and nodes that join them.

    Results of parts are joined as in FlashAttention's online softmax: each is multiplied by
    exp(its highest score - the highest of all).
    """

    def parts_of(node: Node, buffers: dict[str, Buffer]) -> Sequence[Node] | None:
        parts = _parts(node, target) if isinstance(node, Attention) else 1
        return _split(node, parts, buffers) if isinstance(node, Attention) and parts > 1 else None

    return graph.expanded(parts_of)


def _parts(node: Attention, target: Target) -> int:
    batch, heads, queries, keys, head, value_head = node.sizes
    few, count = upper_bound(queries), magnitude(batch * heads)
    if few is None or count is None or not (head.is_constant and value_head.is_constant):
        return 1
    if node.kept is not None or node.logsumexp is not None:
        return 1  # training, where one of so few queries is rare
    if max(int(head), int(value_head)) > 4 * target.max_workgroup_invocations:
        return 1
    return cost.attention_parts(count, few, magnitude(keys), target)


def _split(node: Attention, parts: int, buffers: dict[str, Buffer]) -> list[Node]:
    batch, heads, queries, _, _, value_head = node.sizes
    f32, result = dtypes.float32, buffers[node.output]
    ranges = (batch, heads, queries, value_head)
    partial = f"{node.output}_parts"
    sizes = (as_expr(parts), batch, heads, queries, node.wide + 4)
    buffers[partial] = intermediate(partial, f32, sizes)
    nodes: list[Node] = [replace(node, output=partial, parts=parts)]
    (part,) = iteration_symbols("r", (parts,))
    *row, element = iteration_symbols("i", ranges)

    def load(at: IntLike) -> Scalar:
        return Load(partial, tuple(index(i) for i in (part, *row, as_expr(at))), f32)

    def joined(suffix: str, kind: str, body: Scalar) -> Scalar:
        """A reduction over the parts."""
        name = f"{node.output}_{suffix}"
        buffers[name] = intermediate(name, f32, ranges)
        nodes.append(Reduction(name, kind, ranges, (as_expr(parts),), body, origins=node.origins))
        return Load(name, tuple(index(i) for i in (*row, element)), f32)

    lowest = const(float("-inf"), f32)
    top = joined("highest", "maximum", load(node.wide))
    # Where every key is masked, exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN.
    shift = apply("where", apply("eq", top, lowest), const(0, f32), top)
    weight = apply("fast_exp", apply("sub", load(node.wide), shift))
    total = joined("total", "sum", apply("mul", weight, load(node.wide + 1)))
    summed = joined("sum", "sum", apply("mul", weight, load(element)))
    empty = apply("eq", total, const(0, f32))
    quotient = apply("div", summed, total)
    without_keys = const(0 if node.safe else float("nan"), f32)
    body = apply("where", empty, without_keys, quotient)
    return [*nodes, Pointwise(node.output, ranges, cast(body, result.dtype), origins=node.origins)]
