"""Gradients of attention: one kernel for the queries', one for the keys' and values'."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...ir.access import VECTOR, flat_values, is_multiple_of
from ...ir.attention_nodes import AttentionGradient
from ...ir.buffers import Buffer
from ...ir.graph import Member
from ...ir.scalar import Index, Load, Scalar
from ...ir.spaces import symbol_keys
from ...plan.model import KernelCall
from ...symbolic.sizes import Expr, Symbol, atom_expr, ceildiv, iteration, product
from ...target import Target
from ..hardening.spelling import all_of
from ..tilings.attention_tilings import AttentionGradientTiling, gradient_work
from ..tilings.attention_units import SHARING, AttentionGradientUnitsTiling
from ..tilings.units import dialect_of
from .attention_kernel import scale_inputs
from .builder import Computed, KernelBuilder
from .epilogue import Store, points_along, render_store


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one operand.

    Attributes:
        operand: how they are loaded.
        name: of the load function.
        parameters: of the load function, in WGSL.
        outer: arguments of the load function before the row.
    """

    operand: Computed
    name: str
    parameters: str
    outer: str


@dataclass(frozen=True, slots=True)
class OperandTile(Rows):
    """Rows of one operand in workgroup memory, for a kernel in which invocations multiply.

    The vec4s of a row are exchanged in a pattern that changes from row to row (a power of two
    divides the width), so that invocations read different rows from different banks: vec4 c of row
    r is vec4 c ^ (r & mask).

    Attributes:
        at: where the tile starts, in vec4s.
        width: vec4s of a row.
        scaled: whether it is multiplied by the scale of scores.
        unroll: vec4s of a row that are multiplied per iteration; they divide the width.
    """

    at: int
    width: int
    scaled: bool
    unroll: int

    @property
    def mask(self) -> int:
        """See above."""
        return min(self.width & -self.width, 8) - 1


def generate_attention_gradient(
    node: AttentionGradient,
    buffers: dict[str, Buffer],
    target: Target,
    tiling: AttentionGradientTiling | AttentionGradientUnitsTiling,
) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    if isinstance(tiling, AttentionGradientUnitsTiling):
        return _in_units(node, builder, tiling)
    return _tiled(node, builder, tiling)


def _tiled(
    node: AttentionGradient, builder: KernelBuilder, tiling: AttentionGradientTiling
) -> KernelCall:
    """The kernel in which invocations multiply."""
    width, value_width = (int(ceildiv(size, VECTOR)) for size in node.sizes[5:])
    _, walked, _ = gradient_work(node)
    make = _FunctionMaker(builder, node, tiling)
    steps = (ceildiv(walked, tiling.walked) + 1) * (node.sizes[2] if node.of == "keys" else 1)
    return _finish(
        node,
        make,
        "attention_gradient",
        {"tiles": make.tiles(width, value_width)},
        tiling.workgroup_nbytes(width, value_width),
        steps * (width + value_width + tiling.walked // 2 + 6),
    )


def _in_units(
    node: AttentionGradient, builder: KernelBuilder, tiling: AttentionGradientUnitsTiling
) -> KernelCall:
    """The kernel in which matrix units multiply."""
    dialect, by_keys = dialect_of(builder.target), node.of == "keys"
    widths = tiling.widths(*(int(size) for size in node.sizes[5:]))
    make = _FunctionMaker(builder, node, tiling)
    _, walked, _ = gradient_work(node)
    steps = (ceildiv(walked, tiling.walked) + 1) * (node.sizes[2] if by_keys else 1)
    staged = tiling.owned * sum(widths) // (VECTOR * tiling.workgroup) + 2
    drained = tiling.turns * (sum(widths) // (VECTOR * SHARING) + 4)
    return _finish(
        node,
        make,
        "attention_gradient_units",
        {
            "tiles": make.rows(),
            "head": widths[0],
            "value_head": widths[1],
            "dialect": dialect,
        },
        tiling.workgroup_nbytes(*widths, by_keys, owned_are_kept=dialect == "lanes"),
        steps + staged + drained,
    )


def _finish(
    node: AttentionGradient,
    make: _FunctionMaker,
    template: str,
    inputs: dict[str, Any],
    workgroup_nbytes: int,
    iterations: Expr,
) -> KernelCall:
    """The kernel. ``inputs``: those of this template."""
    builder, tiling, by_keys = make.builder, make.tiling, node.of == "keys"
    batch, heads, group, queries, keys, head, value_head = node.sizes
    owned, walked, owners = gradient_work(node)
    tiles = ceildiv(owned, tiling.owned)
    total = owners * tiles
    products = 2 * (head + value_head) if by_keys else 2 * head + value_head
    return builder.finish(
        "attention",
        {
            "tiling": tiling,
            "by_keys": by_keys,
            "rows": {name: make.row(body) for name, body in node.rows.items()},
            "pairs": {name: make.pair(body) for name, body in node.pairs.items()},
            "score_mod": None if node.score_mod is None else make.pair(node.score_mod),
            "score_grad": None if node.score_grad is None else make.pair(node.score_grad),
            "causal": node.causal,
            "window": node.window,
            **scale_inputs(builder, node.scale),
            "group": builder.index(group),
            "owners": builder.index(owners),
            "queries": builder.index(queries),
            "keys": builder.index(keys),
            "exact": is_multiple_of(walked, tiling.walked),
            "total": builder.index(total),
            "count": builder.index(tiles),
            "stores": make.stores(),
            **inputs,
        },
        workgroup_size=tiling.workgroup,
        workgroups=total,
        origins=node.origins,
        flops=product((batch, heads, group, queries, keys)) * 2 * products,
        workgroup_nbytes=workgroup_nbytes,
        iterations=iterations,
        template=template,
    )


class _FunctionMaker:
    """Renders the load and store functions of one kernel.

    Their parameters are ``b``, a flat position in batch and key heads, ``g`` in the group of query
    heads, rows ``m`` of queries and ``n`` of keys, and ``k`` or ``d`` in a head.
    """

    def __init__(
        self,
        builder: KernelBuilder,
        node: AttentionGradient,
        tiling: AttentionGradientTiling | AttentionGradientUnitsTiling,
    ) -> None:
        self.builder = builder
        self.node = node
        self.tiling = tiling
        self.batch, self.heads, self.group, self.queries, self.keys, *self.elements = node.sizes
        self.is_owned = {"m": node.of == "queries", "n": node.of == "keys"}
        self.fixed: dict[Symbol, Expr] = {
            **flat_values("b", (self.batch, self.heads), iteration("b", self.batch * self.heads)),
            **flat_values("g", (self.group,), iteration("g", self.group)),
            **flat_values("m", (self.queries,), iteration("m", self.queries)),
            **flat_values("n", (self.keys,), iteration("n", self.keys)),
        }

    def rows(self) -> dict[str, Rows]:
        """The operands by their role.

        Scores are owned · walked, gradients of weights owned_values · walked_values.
        """
        node = self.node
        by_query = {"query": node.query, "gradient": node.gradient}
        by_key = {"key": node.key, "value": node.value}
        owned, walked = (by_key, by_query) if node.of == "keys" else (by_query, by_key)
        roles = ("owned", "owned_values", "walked", "walked_values")
        found = {}
        for role, (name, body) in zip(roles, [*owned.items(), *walked.items()], strict=True):
            prefix, size = "k", self.elements[0]
            if role.endswith("_values"):
                prefix, size = "d", self.elements[1]
            row = "m" if name in by_query else "n"
            outer = ("b", "g") if row == "m" else ("b",)
            found[role] = Rows(
                self._vectors(body, row, prefix, size),
                name,
                ", ".join(f"{p}: i32" for p in (*outer, row, prefix)),
                ", ".join(outer),
            )
        return found

    def tiles(self, width: int, value_width: int) -> dict[str, OperandTile]:
        """The operands in workgroup memory."""
        tiling = self.tiling
        assert isinstance(tiling, AttentionGradientTiling)
        found, at = {}, 0
        for role, rows in self.rows().items():
            wide = value_width if role.endswith("_values") else width
            unroll = math.gcd(tiling.unroll, wide)
            parts = rows.operand, rows.name, rows.parameters, rows.outer
            found[role] = OperandTile(*parts, at, wide, rows.name == "query", unroll)
            at += (
                tiling.outer_tile_vec4s(wide)
                if role.startswith("owned")
                else tiling.inner_tile_vec4s(wide)
            )
        return found

    def row(self, body: Scalar) -> Computed:
        """A load function of b, g and m."""
        return self.builder.compute(body, [self.fixed], self._guard("m"))

    def pair(self, body: Scalar) -> Computed:
        """A load function of b, g, m and n."""
        guard = all_of([self._guard("m"), self._guard("n")])
        return self.builder.compute(body, [self.fixed], guard)

    def _vectors(self, body: Scalar, row: str, prefix: str, size: Expr) -> Computed:
        lanes, limit = points_along(
            prefix, size, lambda p: {**self.fixed, **flat_values(prefix, (size,), p)}
        )
        whole = is_multiple_of(size, self.tiling.head_step)
        inside = "" if whole else f"{prefix} < {self.builder.index(limit)}"
        return self.builder.compute(body, lanes, all_of([self._guard(row), inside]))

    def _guard(self, row: str) -> str:
        """Whether a row is there; "" where every tile is full."""
        limits = self._limits(row)
        return f"{row} < {self.builder.index(limits[row])}" if limits else ""

    def _limits(self, row: str) -> dict[str, Expr]:
        """How many rows there are, unless every tile is full."""
        count = self.queries if row == "m" else self.keys
        step = self.tiling.owned if self.is_owned[row] else self.tiling.walked
        return {} if is_multiple_of(count, step) else {row: count}

    def stores(self) -> dict[str, Store]:
        """How the sums of `OperandTile`s ``walked`` and ``walked_values`` are stored."""
        row = "b0 b1 g0 m0" if self.node.of == "queries" else "b0 b1 n0"
        outputs = zip(("walked", "walked_values"), self.node.outputs, self.elements, strict=False)
        return {role: self._store(output, row, size) for role, output, size in outputs}

    def _store(self, output: str, row: str, size: Expr) -> Store:
        dtype = self.builder.buffers[output].dtype
        symbols = {symbol.name: symbol for symbol in self.fixed}
        element = iteration("e0", size)
        (last,) = symbol_keys([element])
        index = (*(atom_expr(symbols[name]) for name in row.split()), element)
        load = Load(output, tuple(map(Index, index)), dtype)
        return render_store(
            self.builder,
            [Member(output, load, index, True)],
            output,
            ("e", size),
            lambda e: {**self.fixed, last: e},
            self._limits(row[-2]),
        )
