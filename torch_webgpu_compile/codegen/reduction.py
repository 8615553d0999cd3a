"""Row groups: reductions and everything computed from the same rows, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .. import dtypes
from ..ir.access import neighbours_in_rows
from ..ir.graph import Buffer, Member, RowGroup
from ..ir.nodes import iteration_symbols, symbol_keys
from ..ir.scalar import Index, Load, Scalar, children, loads_of
from ..plan.model import KernelCall
from ..sizes import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    ceildiv,
    delinearize,
    iteration,
    product,
    symbols_of,
)
from ..target import Target
from .accumulate import Accumulator, accumulator
from .kernel import KernelBuilder, flat_environment, fold_grid
from .pointwise import Lanes, group_origins, memory_order
from .scalar_wgsl import Renderer
from .storage import VECTOR
from .tiling import choose_row_tiling
from .values import Scope, Text


@dataclass
class Phase:
    """One pass over the row; see ``templates/reduction.wgsl.jinja``."""

    lines: list[str] = field(default_factory=list)
    accumulators: list[Accumulator] = field(default_factory=list)
    loop: str = ""
    body: list[str] = field(default_factory=list)
    close: list[str] = field(default_factory=list)


def generate_rows(group: RowGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of a row group."""
    return _RowKernel(group, buffers, target).generate()


class _RowKernel:
    def __init__(self, group: RowGroup, buffers: dict[str, Buffer], target: Target) -> None:
        self.group = group
        self.target = target
        self.builder = KernelBuilder(target, buffers)
        self.row_symbols = symbol_keys(iteration_symbols("i", group.rows))
        self.element_symbols = symbol_keys(iteration_symbols("r", group.elements))
        self.rows = product(group.rows)
        self.length = product(group.elements)
        self.by_name = {m.output: m for m in group.members}
        self.varying = self._varying_members()
        self.depth = self._depths()
        self.phases_count = max(self.depth[m.output] for m in group.members if m.reduction)
        final_pass = any(m.store and m.output in self.varying for m in group.members)
        self.tiling = choose_row_tiling(
            self.rows,
            self.length,
            neighbours_in_rows(
                [m.body for m in group.members],
                {k: b for k, b in buffers.items() if k not in self.by_name},
                self.row_symbols,
                self.element_symbols,
            ),
            target,
            self.phases_count > 1 or final_pass,
            1 if any(m.body.dtype is dtypes.float64 for m in group.members) else VECTOR,
        )
        self.values: dict[str, Text] = {}
        self.row_scope = Scope()
        order = memory_order(group.members, self.row_symbols, buffers)
        row_env = flat_environment(self.row_symbols, self._row(), order)
        row_env.update({s: ZERO for s in self.element_symbols if s.extent is ONE})
        self.row_env = row_env
        self.row_renderer = self.builder.renderer(
            [row_env], self.row_scope, member=lambda load: self.values.get(load.buffer)
        )
        self.kept: dict[int, Scope] = {}
        self.outside = lru_cache(maxsize=None)(self._belongs_to_row)

    def _row(self) -> Expr:
        return iteration("row", self.rows)

    # -- analysis --------------------------------------------------------------------------------

    def _varying_members(self) -> set[str]:
        """Members with one value per element rather than per row."""
        elements = set(self.element_symbols)
        found: set[str] = set()
        for m in self.group.members:
            if m.reduction is None and any(symbols_of(i) & elements for i in m.index):
                found.add(m.output)
        return found

    def _depths(self) -> dict[str, int]:
        """Passes over the row that must be complete before a member's value is known."""
        depth: dict[str, int] = {}
        for m in self.group.members:
            needs = [depth[o.buffer] for o in loads_of(m.body) if o.buffer in depth]
            depth[m.output] = max(needs, default=0) + (1 if m.reduction else 0)
        return depth

    def _belongs_to_row(self, node: Scalar) -> bool:
        if isinstance(node, Index):
            return symbols_of(node.expr).isdisjoint(self.element_symbols)
        if isinstance(node, Load) and node.buffer in self.varying:
            return False
        return all(self.outside(c) for c in children(node))

    # -- rendering -------------------------------------------------------------------------------

    def generate(self) -> KernelCall:
        t = self.tiling
        phases: list[Phase] = []
        for d in range(1, self.phases_count + 1):
            phases.append(self._phase(d))
        final = self._final()
        row_count = self.builder.index(self.rows)
        workgroups = ceildiv(self.rows, t.rows)
        grid = fold_grid(workgroups, self.target)
        exact = grid[1] is ONE and workgroups * t.rows is self.rows
        return self.builder.finish(
            "reduction",
            "reduction.wgsl.jinja",
            {
                "workgroup_size": t.workgroup,
                "threads": t.threads,
                "rows": t.rows,
                "stride": 1 if t.elements_fast else t.rows,
                "elements_fast": t.elements_fast,
                "subgroup": self._subgroup(),
                "row_count": row_count,
                "checked": not exact,
                "phases": phases,
                "final": final,
            },
            workgroup_size=t.workgroup,
            grid=grid,
            origins=group_origins(self.group.members),
            flops=self.rows * self.length * len(self.group.members),
            workgroup_nbytes=sum(
                part.nbytes * t.workgroup
                for p in phases
                for a in p.accumulators
                for part in a.parts
            )
            if t.threads > 1
            else 0,
        )

    def _subgroup(self) -> int:
        """Invocations that exchange accumulators by shuffles; 0 where that is not certain to work.

        It needs one known subgroup size, and rows that are runs of invocations. 64-bit and bool
        values are not shuffled everywhere.
        """
        low, high = self.target.subgroup_sizes
        types = {m.body.dtype.compute for m in self.group.members if m.reduction}
        known = low == high and low > 1 and "subgroup" in self.target.features
        return low if known and self.tiling.elements_fast and types <= {"f32", "i32", "u32"} else 0

    def _phase(self, d: int) -> Phase:
        """Pass d: reductions of depth d, and stores of elements known before it."""
        phase = Phase()
        self._row_members(d - 1)
        reductions = [m for m in self.group.members if m.reduction and self.depth[m.output] == d]
        stores = [
            m
            for m in self.group.members
            if m.store and m.output in self.varying and self.depth[m.output] == d - 1
        ]
        phase.accumulators = [
            accumulator(f"a{self.by_order(m)}", m.reduction or "", m.body.dtype, self.tiling.lanes)
            for m in reductions
        ]
        for chunk, predicate, renderer in self._chunks(phase):
            lines = renderer.scope.lines
            for m, acc in zip(reductions, phase.accumulators, strict=True):
                value = renderer.render(m.body)
                lines += acc.update(value, predicate, self._position(chunk))
            for m in stores:
                lines += self._store_element(m, renderer, predicate)
            phase.body += lines
            renderer.scope.lines = []
        for acc in phase.accumulators:
            phase.close += acc.close()
        phase.lines, self.row_scope.lines = self.row_scope.lines, []
        for m, acc in zip(reductions, phase.accumulators, strict=True):
            dtype = self.builder.buffers[m.output].dtype
            narrow = acc.parts[-1].name if acc.is_position else ""
            self.values[m.output] = Text(acc.result(dtype), 1, dtype, narrow)
        return phase

    def by_order(self, member: Member) -> int:
        """A member's position in the group."""
        return list(self.by_name).index(member.output)

    def _final(self) -> list[str]:
        """After the last pass: values per row, then elements that needed the last pass."""
        last = self.phases_count
        self._row_members(last)
        stores = [
            m
            for m in self.group.members
            if m.store and m.output in self.varying and self.depth[m.output] == last
        ]
        loop = Phase()
        for _, predicate, renderer in self._chunks(loop) if stores else ():
            for m in stores:
                renderer.scope.lines += self._store_element(m, renderer, predicate)
            loop.body += renderer.scope.lines
            renderer.scope.lines = []
        lines = self.row_scope.lines + self._row_stores()
        self.row_scope.lines = []
        if loop.loop and loop.body:
            return [*lines, f"for (var c = 0; c < {loop.loop}; c++) {{", *loop.body, "}"]
        return [*lines, *loop.body]

    def _row_members(self, depth: int) -> None:
        """Values per row that are known after ``depth`` passes."""
        for m in self.group.members:
            if (
                m.reduction is None
                and m.output not in self.varying
                and self.depth[m.output] == depth
            ):
                self.values[m.output] = self.row_renderer.render(m.body)

    def _row_stores(self) -> list[str]:
        stored = [m for m in self.group.members if m.store and m.output not in self.varying]
        if not stored:
            return []
        lines: list[str] = []
        for m in stored:
            lines += self.builder.store(m, self.values[m.output], [self.row_env])
        return ["if (row_ok && g == 0) {", *(f"  {line}" for line in lines), "}"]

    def _store_element(self, m: Member, renderer: Renderer, predicate: str | None) -> list[str]:
        value = renderer.render(Load(m.output, tuple(Index(i) for i in m.index), m.body.dtype))
        lines = self.builder.store(m, value, renderer.lanes)
        guard = [*(["row_ok"] if self._rows_checked else []), *([predicate] if predicate else [])]
        if not guard:
            return lines
        return [f"if ({' && '.join(guard)}) {{", *(f"  {line}" for line in lines), "}"]

    @property
    def _rows_checked(self) -> bool:
        workgroups = ceildiv(self.rows, self.tiling.rows)
        exact = fold_grid(workgroups, self.target)[1] is ONE
        return not (exact and workgroups * self.tiling.rows is self.rows)

    # -- chunks ----------------------------------------------------------------------------------

    def _chunks(self, phase: Phase) -> list[tuple[Expr, str | None, Renderer]]:
        """(chunk, predicate, renderer) for each share of the row that an invocation covers."""
        t = self.tiling
        step = t.threads * t.lanes
        if t.chunks is None:
            trips = ceildiv(self.length, step * t.unroll)
            phase.loop = self.builder.index(trips)
            first = iteration("c", trips) * t.unroll
            return [self._chunk(first + u, Scope(parent=self.row_scope)) for u in range(t.unroll)]
        result = []
        for k in range(t.chunks):
            scope = self.kept.setdefault(k, Scope(parent=self.row_scope))
            result.append(self._chunk(as_expr(k), scope))
        return result

    def _position(self, chunk: Expr, lane: int = 0) -> str:
        return self.builder.index(self._element(chunk, lane))

    def _element(self, chunk: Expr, lane: int) -> Expr:
        t = self.tiling
        g = iteration("g", t.threads) if t.threads > 1 else ZERO
        return (chunk * t.threads + g) * t.lanes + lane

    def _chunk(self, chunk: Expr, scope: Scope) -> tuple[Expr, str | None, Renderer]:
        t = self.tiling
        step = t.threads * t.lanes
        lanes: Lanes = []
        for lane in range(t.lanes):
            index = delinearize(self._element(chunk, lane), self.group.elements)
            lanes.append({**self.row_env, **dict(zip(self.element_symbols, index, strict=True))})
        whole = (self.length % (step if t.chunks else step * t.unroll)) is ZERO
        if chunk.is_constant and self.length.is_constant:
            whole = whole or (chunk.constant + 1) * step <= int(self.length)
        predicate = None
        if not whole:
            key = ("predicate", chunk)
            known = scope.find(key)
            if known is None:
                first = self._position(chunk)
                known = self.builder.renderer(lanes, scope).let(
                    f"{first} < {self.builder.index(self.length)}", 1, dtypes.bool_
                )
                scope.known[key] = known
            predicate = known.code
        renderer: Renderer

        def member(load: Load) -> Text | None:
            found = self.values.get(load.buffer)
            if found is None and load.buffer in self.by_name:
                return renderer.render(self.by_name[load.buffer].body)
            return found

        renderer = self.builder.renderer(
            lanes,
            scope,
            member=member,
            predicate=predicate,
            outer=self.row_renderer,
            belongs_outside=self.outside,
        )
        return chunk, predicate, renderer
