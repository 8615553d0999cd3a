"""Attention of few queries over a part of the keys per workgroup; the results are joined later."""

from __future__ import annotations

from typing import NamedTuple

from ...ir.access import VECTOR, flat_values
from ...ir.attention_nodes import Attention
from ...ir.buffers import Buffer
from ...ir.graph import AnchorGroup
from ...ir.scalar import Index, Masked, Op, Scalar, cast, scalar_symbols
from ...ir.spaces import iteration_symbols
from ...plan.model import KernelCall
from ...symbolic.sizes import Expr, ceildiv, iteration, product
from ...target import Target
from ..tilings.attention_tilings import AttentionPartsTiling
from .attention_kernel import LoadFunctionMaker, scale_inputs
from .builder import Computed, KernelBuilder


class NewRow(NamedTuple):
    """A row that is loaded from elsewhere; see `scheduler.rewrites.cache_writes`.

    Attributes:
        condition: of row n, one lane; holds for one row at most.
        row: what to load instead.
    """

    condition: Computed
    row: Computed


def generate_attention_parts(
    group: AnchorGroup, buffers: dict[str, Buffer], target: Target, tiling: AttentionPartsTiling
) -> KernelCall:
    """The kernel of an attention node with several parts."""
    node = group.anchor
    assert isinstance(node, Attention)
    assert not group.epilogue
    batch, heads, queries, keys, head, value_head = node.sizes
    builder = KernelBuilder(target, buffers)
    b = flat_values("b", (batch, heads), iteration("b", batch * heads))
    make = LoadFunctionMaker(builder, b)
    total = batch * heads * node.parts
    row = (iteration("part", node.parts) * batch * heads + iteration("b", batch * heads)) * queries
    row = (row + iteration("m", queries)) * (node.wide // VECTOR + 1)
    key, new_key = _operands(make, node.key, ("n", keys), ("k", head))
    value, new_value = _operands(make, node.value, ("n", keys), ("d", value_head))
    query = make(node.query, ("m", queries), ("k", head))
    bodies = {"bias": node.bias, "replaced": node.replaced, "score_mod": node.score_mod}
    pairs = {
        name: None if body is None else make(body, ("m", queries), ("n", keys), vector=False)
        for name, body in bodies.items()
    }
    return builder.finish(
        "attention",
        {
            "tiling": tiling,
            "queries": int(queries),
            "query": query,
            "key": key,
            "value": value,
            "new_rows": {"key": new_key, "value": new_value},
            **pairs,
            "causal": node.causal,
            "window": node.window,
            **scale_inputs(builder, node.scale),
            "end": make.of_row(node.end, queries),
            "keys": builder.index(keys),
            "per_part": builder.index(ceildiv(keys, node.parts)),
            "total": builder.index(total),
            "parts": node.parts,
            "row": builder.index(row),
            "store": builder.bindings.function(node.output, "store4"),
        },
        workgroup_size=tiling.workgroup,
        workgroups=total,
        origins=node.origins,
        flops=product((batch, heads, queries, keys)) * 2 * (head + value_head),
        workgroup_nbytes=tiling.workgroup_nbytes,
        iterations=_iterations(tiling, node, keys),
        template="attention_parts",
    )


def _iterations(tiling: AttentionPartsTiling, node: Attention, keys: Expr) -> Expr:
    """Loop iterations of an invocation: scores, and their maximum, for each query in each step."""
    scores = -(-tiling.keys // tiling.workgroup) * (tiling.lanes + 2) + 1
    in_step = int(node.sizes[2]) * (scores + tiling.keys + 1) + 1
    after = int(node.sizes[2]) * 2 * tiling.rows
    return (ceildiv(ceildiv(keys, node.parts), tiling.keys) + 1) * in_step + after


def _operands(
    make: LoadFunctionMaker, body: Scalar, outer: tuple[str, Expr], inner: tuple[str, Expr]
) -> tuple[Computed, NewRow | None]:
    """An operand, and apart from it the choice of a new row: its branch would hold up the loads
    after it, of which an invocation has many in flight."""
    if isinstance(body, Op) and body.name == "cast" and isinstance(body.args[0], Masked):
        choice, dtype = body.args[0], body.dtype
        body = Masked(choice.condition, cast(choice.body, dtype), cast(choice.other, dtype))
    (row,) = iteration_symbols(outer[0], (outer[1],))
    if not isinstance(body, Masked) or not _is_of_one(body.condition, row):
        return make(body, outer, inner), None
    condition = make(body.condition, outer, inner, vector=False)
    return make(body.other, outer, inner), NewRow(condition, make(body.body, outer, inner))


def _is_of_one(condition: Scalar, row: Expr) -> bool:
    """Whether a condition is that a row's number equals something that depends on no index."""
    match condition:
        case Op("eq", (Index(expr), other)) | Op("eq", (other, Index(expr))):
            return expr is row and not scalar_symbols(other)
    return False
