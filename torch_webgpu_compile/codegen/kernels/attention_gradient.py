"""Gradients of attention: one kernel for the queries', one for the keys' and values'."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import UnsupportedOp
from ...ir.access import VECTOR, Lanes, flat_values, is_multiple_of
from ...ir.anchors import store_is_vector
from ...ir.attention_nodes import AttentionGradient
from ...ir.buffers import Buffer
from ...ir.graph import Member
from ...ir.scalar import Scalar, const
from ...ir.spaces import symbol_keys
from ...plan.model import KernelCall
from ...symbolic.sizes import ZERO, Expr, Symbol, atom_expr, ceildiv, iteration, product
from ...target import Target
from ..hardening.spelling import all_of
from ..tilings.attention import AttentionGradientTiling, choose_attention_gradient_tiling
from ..values import Scope, Text
from .attention import LoadFunction
from .builder import KernelBuilder, fold_grid
from .epilogue import Store


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one operand in workgroup memory.

    The vec4s of a row are exchanged in a pattern that changes from row to row (a power of two
    divides the width), so that invocations read different rows from different banks: vec4 c of row
    r is vec4 c ^ (r & mask).

    Attributes:
        operand: how they are loaded.
        name: of the load function.
        parameters: of the load function, in WGSL.
        outer: arguments of the load function before the row.
        at: where the tile starts, in vec4s.
        width: vec4s of a row.
        scaled: whether it is multiplied by the scale of scores.
        unroll: vec4s of a row that are multiplied per iteration; they divide the width.
    """

    operand: LoadFunction
    name: str
    parameters: str
    outer: str
    at: int
    width: int
    scaled: bool
    unroll: int

    @property
    def mask(self) -> int:
        """See above."""
        return min(self.width & -self.width, 8) - 1


def generate_attention_gradient(
    node: AttentionGradient, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of one node.

    Raises:
        UnsupportedOp: the head sizes are symbolic or too large for workgroup memory.
    """
    batch, heads, group, queries, keys, head, value_head = node.sizes
    if not (head.is_constant and value_head.is_constant):
        raise UnsupportedOp("attention", "the head size is symbolic", "mark it static")
    width, value_width = (int(ceildiv(size, VECTOR)) for size in (head, value_head))
    by_keys = node.of == "keys"
    owned, walked = (keys, queries) if by_keys else (queries, keys)
    owners = batch * heads if by_keys else batch * heads * group
    tiling = choose_attention_gradient_tiling(owned, owners, width, value_width, target)
    if tiling is None:
        raise UnsupportedOp(
            "attention",
            f"gradients of a head size of {max(int(head), int(value_head))} do not fit "
            f"{target.max_workgroup_nbytes} bytes of workgroup memory",
            "use smaller heads",
        )
    builder = KernelBuilder(target, buffers)
    make = _FunctionMaker(builder, node, tiling)
    tiles = ceildiv(owned, tiling.owned)
    total = owners * tiles
    scores = product((batch, heads, group, queries, keys))
    products = 2 * (head + value_head) if by_keys else 2 * head + value_head
    steps = (ceildiv(walked, tiling.walked) + 1) * (group if by_keys else 1)
    in_step = width + value_width + tiling.walked // 2 + 6
    return builder.finish(
        "attention",
        "attention_gradient.wgsl.jinja",
        {
            "tiling": tiling,
            "by_keys": by_keys,
            "tiles": make.tiles(width, value_width),
            "rows": {name: make.row(body) for name, body in node.rows.items()},
            "pairs": {name: make.pair(body) for name, body in node.pairs.items()},
            "causal": node.causal,
            "scale": f"{node.scale!r}f",
            "group": builder.index(group),
            "owners": builder.index(owners),
            "queries": builder.index(queries),
            "keys": builder.index(keys),
            "exact": is_multiple_of(walked, tiling.walked),
            "total": builder.index(total),
            "count": builder.index(tiles),
            "stores": make.stores(),
        },
        workgroup_size=tiling.workgroup,
        grid=fold_grid(total, target),
        origins=node.origins,
        flops=scores * 2 * products,
        workgroup_nbytes=tiling.workgroup_nbytes(width, value_width),
        iterations=steps * in_step,
    )


class _FunctionMaker:
    """Renders the load and store functions of one kernel.

    Their parameters are ``b``, a flat position in batch and key heads, ``g`` in the group of query
    heads, rows ``m`` of queries and ``n`` of keys, and ``k`` or ``d`` in a head.
    """

    def __init__(
        self, builder: KernelBuilder, node: AttentionGradient, tiling: AttentionGradientTiling
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

    def tiles(self, width: int, value_width: int) -> dict[str, Tile]:
        """The tiles by their role.

        Scores are owned · walked, gradients of weights owned_values · walked_values.
        """
        tiling, node = self.tiling, self.node
        by_query = {"query": node.query, "gradient": node.gradient}
        by_key = {"key": node.key, "value": node.value}
        owned, walked = (by_key, by_query) if node.of == "keys" else (by_query, by_key)
        sizes = [
            tiling.owned_size(width),
            tiling.owned_size(value_width),
            tiling.walked_size(width),
        ]
        starts = [sum(sizes[:k]) for k in range(4)]
        roles = ("owned", "owned_values", "walked", "walked_values")
        found = {}
        for role, at, (name, body) in zip(
            roles, starts, [*owned.items(), *walked.items()], strict=True
        ):
            prefix, k = ("d", 1) if role.endswith("_values") else ("k", 0)
            row = "m" if name in by_query else "n"
            outer = ("b", "g") if row == "m" else ("b",)
            found[role] = Tile(
                self._vectors(body, row, prefix, self.elements[k]),
                name,
                ", ".join(f"{p}: i32" for p in (*outer, row, prefix)),
                ", ".join(outer),
                at,
                value_width if k else width,
                name == "query",
                math.gcd(tiling.unroll, value_width if k else width),
            )
        return found

    def row(self, body: Scalar) -> LoadFunction:
        """A load function of b, g and m."""
        return self._operand(body, [self.fixed], [self._guard("m")])

    def pair(self, body: Scalar) -> LoadFunction:
        """A load function of b, g, m and n."""
        return self._operand(body, [self.fixed], [self._guard("m"), self._guard("n")])

    def _vectors(self, body: Scalar, row: str, prefix: str, size: Expr) -> LoadFunction:
        vector = is_multiple_of(size, VECTOR)
        limit = size // VECTOR if vector else size
        at = iteration(prefix, limit)
        positions = [at * VECTOR + x for x in range(VECTOR)] if vector else [at]
        lanes: Lanes = [{**self.fixed, **flat_values(prefix, (size,), p)} for p in positions]
        inside = "" if vector else f"{prefix} < {self.builder.index(limit)}"
        return self._operand(body, lanes, [self._guard(row), inside])

    def _operand(self, body: Scalar, lanes: Lanes, guards: list[str]) -> LoadFunction:
        scope = Scope()
        result = self.builder.renderer(lanes, scope).render(body)
        guard = all_of([g for g in guards if g])
        code = result.widen(len(lanes))
        return LoadFunction(len(lanes), scope.lines, code, guard, body.dtype.compute)

    def _guard(self, row: str) -> str:
        """Whether a row is there; "" where every tile is full."""
        count = self.queries if row == "m" else self.keys
        step = self.tiling.owned if self.is_owned[row] else self.tiling.walked
        return "" if is_multiple_of(count, step) else f"{row} < {self.builder.index(count)}"

    def stores(self) -> dict[str, Store]:
        """How the sums of `Tile`s ``walked`` and ``walked_values`` are stored."""
        head, value_head = self.elements
        if self.node.of == "queries":
            return {"walked": self._store("b0 b1 g0 m0", head)}
        return {
            "walked": self._store("b0 b1 n0", head),
            "walked_values": self._store("b0 b1 n0", value_head, start=head),
        }

    def _store(self, row: str, size: Expr, start: Expr = ZERO) -> Store:
        """Of four neighbouring elements of a row where memory allows, else of one."""
        builder, output = self.builder, self.node.output
        dtype = builder.buffers[output].dtype
        symbols = {symbol.name: symbol for symbol in self.fixed}
        element = iteration("e0", size)
        (last,) = symbol_keys([element])
        index = (*(atom_expr(symbols[name]) for name in row.split()), element + start)
        member = Member(output, const(0, dtype), index, True)
        limit = size // VECTOR
        at = iteration("e", limit)
        lanes: Lanes = [{**self.fixed, last: at * VECTOR + x} for x in range(VECTOR)]
        if not is_multiple_of(size, VECTOR) or not store_is_vector(builder.buffers, member, lanes):
            limit = size
            lanes = [{**self.fixed, last: iteration("e", limit)}]
        lines = builder.store(member, Text("value", len(lanes), dtype), lanes)
        guards = [self._guard(row[-2]), f"e < {builder.index(limit)}"]
        return Store(len(lanes), lines, all_of([g for g in guards if g]))
