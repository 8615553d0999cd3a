"""Attention: scores, softmax and weighted values in one kernel that never stores the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...ir.access import VECTOR, flat_values, is_multiple_of, lane_addresses
from ...ir.anchors import anchor_members
from ...ir.attention_nodes import Attention
from ...ir.buffers import Buffer
from ...ir.graph import AnchorGroup
from ...ir.scalar import Const, Scalar
from ...plan.model import KernelCall
from ...symbolic.sizes import ONE, ZERO, Expr, Symbol, ceildiv, iteration, product
from ...target import Target
from ..hardening.spelling import all_of
from ..tilings.attention_tilings import AttentionTiling, attention_subgroup
from ..tilings.attention_units import SHARING, AttentionUnitsTiling
from ..tilings.units import dialect_of
from .builder import Computed, KernelBuilder
from .epilogue import Store, points_along, render_store
from .pointwise import group_origins


def generate_attention(
    group: AnchorGroup,
    buffers: dict[str, Buffer],
    target: Target,
    tiling: AttentionTiling | AttentionUnitsTiling,
) -> KernelCall:
    """The kernel of an attention node and its epilogue."""
    kernel = _AttentionKernel(group, KernelBuilder(target, buffers))
    if isinstance(tiling, AttentionUnitsTiling):
        return kernel.in_units(tiling)
    return kernel.tiled(tiling)


def scale_inputs(builder: KernelBuilder, scale: Scalar) -> dict[str, Any]:
    """Inputs of attention's templates for the scale: its value, and the function that loads it."""
    if isinstance(scale, Const):
        return {"scale": f"{scale.value!r}f", "given_scale": None}
    return {"scale": "given_scale", "given_scale": builder.compute(scale, [{}])}


class _AttentionKernel:
    """The common part of attention's kernels, however they divide their work."""

    def __init__(self, group: AnchorGroup, builder: KernelBuilder) -> None:
        assert isinstance(group.anchor, Attention)
        self.group, self.builder, self.node = group, builder, group.anchor
        batch, heads, *_ = self.node.sizes
        self.batch = batch * heads
        self.b = flat_values("b", (batch, heads), iteration("b", self.batch))

    def tiled(self, tiling: AttentionTiling) -> KernelCall:
        """The kernel in which invocations multiply."""
        target = self.builder.target
        _, _, queries, keys, head, value_head = self.node.sizes
        wide, value_wide = (VECTOR * int(ceildiv(s, VECTOR)) for s in (head, value_head))
        subgroup = attention_subgroup(tiling, target)
        steps = ceildiv(keys, tiling.keys * tiling.slices)
        in_step = wide // 4 + tiling.keys // 4 + tiling.workgroup // max(1, subgroup) + 5
        if target.prefers_less_code:
            in_step += tiling.keys * (wide + value_wide) // (VECTOR * tiling.slice_workgroup) + 4
        whole_queries = is_multiple_of(queries, tiling.queries)
        return self._finish(
            "attention",
            tiling,
            (wide, value_wide),
            {
                "whole_keys": is_multiple_of(keys, tiling.keys * tiling.slices),
                "queries": "" if whole_queries else self.builder.index(queries),
                "subgroup": subgroup,
                "brief": target.prefers_less_code,
            },
            tiling.workgroup_nbytes(wide, value_wide, subgroup),
            (steps + 1) * in_step + wide,
        )

    def in_units(self, tiling: AttentionUnitsTiling) -> KernelCall:
        """The kernel in which matrix units multiply."""
        dialect = dialect_of(self.builder.target)
        _, _, _, keys, head, value_head = self.node.sizes
        widths = tiling.widths(int(head), int(value_head))
        staged = tiling.queries * widths[0] // (VECTOR * tiling.workgroup) + 1
        voted = tiling.rows_of_invocation * (tiling.keys // SHARING + 1) if self.node.bias else 0
        drained = tiling.rows_of_invocation * (widths[1] // (VECTOR * SHARING) + 2)
        return self._finish(
            "attention_units",
            tiling,
            widths,
            # e⁵ = 148 times what dropout multiplies by has to be less than 65504, the most of f16.
            {
                "dialect": dialect,
                "growth": "2.0f" if self.node.kept is not None else "5.0f",
                "whole_keys": is_multiple_of(keys, tiling.keys),
            },
            tiling.workgroup_nbytes(*widths, queries_are_kept=dialect == "lanes"),
            (ceildiv(keys, tiling.keys) + 1) * (voted + 1) + staged + drained,
        )

    def _finish(
        self,
        template: str,
        tiling: AttentionTiling | AttentionUnitsTiling,
        widths: tuple[int, int],
        inputs: dict[str, Any],
        workgroup_nbytes: int,
        iterations: Expr,
    ) -> KernelCall:
        """The kernel. ``widths``: head sizes, rounded up; ``inputs``: those of this template."""
        builder, node = self.builder, self.node
        batch, heads, queries, keys, head, value_head = node.sizes
        make = LoadFunctionMaker(builder, self.b, tiling)
        query = make(node.query, ("m", queries), ("k", head))
        key = make(node.key, ("n", keys), ("k", head))
        value = make(node.value, ("n", keys), ("d", value_head))
        vector = isinstance(tiling, AttentionTiling)
        bodies = {"bias": node.bias, "replaced": node.replaced}
        bodies |= {"kept": node.kept, "score_mod": node.score_mod}
        pairs = {
            name: None if body is None else make(body, ("m", queries), ("n", keys), vector)
            for name, body in bodies.items()
        }
        tiles = ceildiv(queries, tiling.queries)
        total = batch * heads * tiles
        return builder.finish(
            "attention",
            {
                "tiling": tiling,
                "head": widths[0],
                "value_head": widths[1],
                "query": query,
                "key": key,
                "value": value,
                **pairs,
                "safe": node.safe,
                "statistic": _store_statistic(builder, node, self.b),
                "causal": node.causal,
                "window": node.window,
                "end": make.of_row(node.end, queries),
                "last_query": builder.index(queries - 1),
                **scale_inputs(builder, node.scale),
                "keys": builder.index(keys),
                "total": builder.index(total),
                "tiles": builder.index(tiles),
                "store": self._store(),
                **inputs,
            },
            workgroup_size=tiling.workgroup,
            workgroups=total,
            origins=[*node.origins, *group_origins(self.group.epilogue)],
            flops=product((batch, heads, queries, keys)) * 2 * (head + value_head),
            workgroup_nbytes=workgroup_nbytes,
            iterations=iterations,
            template=template,
        )

    def _store(self) -> Store:
        """How the result is stored, at head element or four ``d`` of row ``m``."""
        builder, node = self.builder, self.node
        queries, size = node.sizes[2], node.sizes[5]
        members = anchor_members([self.group], builder.buffers)
        fixed = {**self.b, **flat_values("m", (queries,), iteration("m", queries))}
        return render_store(
            builder,
            members,
            node.output,
            ("d", size),
            lambda d: {**fixed, **flat_values("d", (size,), d)},
            {"m": queries},
        )


@dataclass
class LoadFunctionMaker:
    """Renders load functions: of four neighbours of the last coordinate at once, or of one.

    Attributes:
        batch: the values of b0 and b1 at flat position ``b``.
        tiling: what the kernel loads at a time, if that is known: what divides it needs no guard.
    """

    builder: KernelBuilder
    batch: dict[Symbol, Expr]
    tiling: AttentionTiling | AttentionUnitsTiling | None = None

    def __call__(
        self,
        body: Scalar,
        outer: tuple[str, Expr],
        inner: tuple[str, Expr],
        vector: bool = True,
    ) -> Computed:
        """``outer`` and ``inner``: prefix of the symbol (and name of the parameter), and its
        extent. ``vector``: four elements at once where they divide the extent.
        """
        name, count = outer
        prefix, size = inner
        fixed = {**self.batch, **flat_values(name, (count,), iteration(name, count))}
        lanes, limit = points_along(
            prefix, size, lambda p: {**fixed, **flat_values(prefix, (size,), p)}, vector
        )
        found, tiling = self.builder.compute(body, lanes, branches=True), self.tiling
        exceeded: list[tuple[str, Expr]] = []  # that a coordinate may pass
        row = size if name == "n" else None
        if tiling is None or not tiling.stays_within(name, count, row):
            exceeded.append((name, count))
        if tiling is None or not tiling.stays_within(prefix, size):
            exceeded.append((prefix, limit))
        guards = [f"{n} < {self.builder.index(end)}" for n, end in exceeded]
        return replace(found, guard=all_of(guards))

    def of_row(self, body: Scalar | None, rows: Expr) -> Computed | None:
        """The load function of a scalar per row, at the symbol m; None without a scalar."""
        if body is None:
            return None
        fixed = {**self.batch, **flat_values("m", (rows,), iteration("m", rows))}
        return self.builder.compute(body, [fixed], branches=True)


def _store_statistic(builder: KernelBuilder, node: Attention, batch: dict[Symbol, Expr]) -> str:
    """A statement that stores ``logsumexp`` of row m of head b; "" where nobody asks for it.

    Attention that is not safe stores ``highest`` and ``rest``.
    """
    if node.logsumexp is None:
        return ""
    buffer = builder.buffers[node.logsumexp]
    queries = node.sizes[2]
    rows = flat_values("m", (queries,), iteration("m", queries))
    row = node.symbols[:3]
    store = builder.bindings.function(node.logsumexp, "store")
    parts = {"logsumexp": row} if node.safe else {"highest": (ZERO, *row), "rest": (ONE, *row)}
    stores = []
    for name, index in parts.items():
        (at,) = lane_addresses(buffer, index, [{**batch, **rows}])
        stores.append(f"{store}({builder.index(at)}, {name});")
    return f"if (m < {builder.index(queries)}) {{ {' '.join(stores)} }}"
