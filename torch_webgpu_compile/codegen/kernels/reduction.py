"""Row groups: reductions and everything computed from the same rows, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ... import dtypes
from ...ir.access import Lanes, flat_environment
from ...ir.buffers import Buffer
from ...ir.graph import Member, RowGroup
from ...ir.rows import choose_row_strategy, row_test
from ...ir.scalar import Index, Load, loads_of
from ...ir.spaces import iteration_symbols, symbol_keys
from ...ir.workgroup_memory import WorkgroupArray
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    as_expr,
    ceildiv,
    delinearize,
    iteration,
    product,
    value_range,
)
from ...target import Target
from ..hardening.spelling import is_known_sum, opaque
from ..values import Scope, Text
from ..wgsl.casts import fitted
from ..wgsl.scalars import Renderer
from .accumulate import Accumulator, AccumulatorVariable, ExpSum, accumulator, exp_sum
from .builder import KernelBody, KernelBuilder, fold_grid
from .packed_products import PackedProducts
from .pointwise import group_origins, memory_order
from .rounding import Rounding


@dataclass
class RowPass:
    """One pass over the row; see ``templates/reduction.wgsl.jinja``."""

    lines: list[str] = field(default_factory=list)
    accumulators: list[Accumulator | ExpSum] = field(default_factory=list)
    body: list[str] = field(default_factory=list)


# A chunk's index, the condition under which it is inside of the row, and its renderer.
Chunk = tuple[Expr, str | None, Renderer]


@dataclass(frozen=True, slots=True)
class ChunkLoop:
    """Chunks of the row that an invocation takes together: once, or in each of ``trips``."""

    trips: Expr | None
    chunks: tuple[Chunk, ...]


def generate_rows(group: RowGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of a row group."""
    builder = KernelBuilder(target, buffers)
    return builder.finish_body(RowKernel(group, builder).body())


class RowKernel:
    """The kernel of a row group while it is made.

    Args:
        workgroup: invocations, at least as many as share a row; else what suits the rows.
    """

    def __init__(
        self, group: RowGroup, builder: KernelBuilder, workgroup: int | None = None
    ) -> None:
        self.group = group
        self.builder = builder
        self.target = target = builder.target
        buffers = builder.buffers
        self.row_symbols = symbol_keys(iteration_symbols("i", group.rows))
        self.element_symbols = symbol_keys(iteration_symbols("r", group.elements))
        self.rows = product(group.rows)
        self.length = product(group.elements)
        self.by_name = {m.output: m for m in group.members}
        self.rounding = Rounding(group.members, buffers)
        self.strategy = strategy = choose_row_strategy(group, buffers, target)
        self.varying, self.sums, self.depth = strategy.varying, strategy.sums, strategy.depth
        self.phases_count = strategy.passes
        self.tiling = strategy.tiling
        self.outside = row_test(group, strategy.varying)
        if workgroup is not None:
            self.tiling = replace(self.tiling, rows=workgroup // self.tiling.threads)
        self.values: dict[str, Text] = {}
        self.row_scope = Scope()
        order = memory_order(group.members, self.row_symbols, buffers)
        self.products: PackedProducts | None = None
        if strategy.packed is not None:
            size = self.tiling.workgroup
            self.products = PackedProducts(group, builder, strategy.packed, order, size)
        row_env = flat_environment(self.row_symbols, iteration("row", self.rows), order)
        row_env.update({s: ZERO for s in self.element_symbols if s.extent is ONE})
        self.row_env = row_env
        self.row_renderer = self.builder.renderer(
            [row_env], self.row_scope, member=lambda load: self.values.get(load.buffer)
        )
        self.kept: dict[int, Scope] = {}
        self.iterations = ZERO

    # -- rendering -------------------------------------------------------------------------------

    def body(self) -> KernelBody:
        """The kernel body of the group."""
        t = self.tiling
        packed = None if self.products is None else self.products.inputs()
        phases = [self._phase(d) for d in range(1, self.phases_count + 1)]
        final = self._final()
        exchanges = len(phases) * t.threads.bit_length()
        return KernelBody(
            "reduction",
            {
                "threads": t.threads,
                "rows": t.rows,
                "stride": 1 if t.elements_fast else t.rows,
                "elements_fast": t.elements_fast,
                "subgroup": self.strategy.subgroup,
                "row_count": self.builder.index(self.rows),
                "checked": self._rows_checked,
                "phases": phases,
                "final": final,
                "packed": packed,
                "rows_each": self._rows_each,
            },
            t.workgroup,
            ceildiv(self.rows, t.rows * self._rows_each),
            group_origins(self.group.members),
            self.rows * self.length * len(self.group.members),
            self._arrays([part for p in phases for a in p.accumulators for part in a.parts]),
            self.iterations + exchanges,
        )

    def _arrays(self, parts: Sequence[AccumulatorVariable]) -> dict[str, WorkgroupArray]:
        """The workgroup memory through which accumulators are exchanged."""
        exchanged = self.strategy.exchanges(self.tiling.workgroup)
        names = [part.name for part in parts] if exchanged else []
        packed = {} if self.strategy.packed is None else self.strategy.packed.arrays()
        return {**dict(zip(names, exchanged, strict=True)), **packed}

    def _phase(self, d: int) -> RowPass:
        """Pass d: reductions of depth d, and stores of elements known before it."""
        phase = RowPass()
        self._row_members(d - 1)
        if self.products is not None:
            return self._packed_phase(phase, self.products)
        reductions = [
            m
            for m in self.group.members
            if m.reduction and m.output not in self.sums and self.depth[m.output] == d
        ]
        stores = self._element_stores(d - 1)
        phase.accumulators = [self._accumulator(m) for m in reductions]
        for loop in self._chunk_loops():
            phase.body += self._loop_lines(loop, reductions, phase.accumulators, stores)
        for acc in phase.accumulators:
            phase.body += acc.close()
        phase.lines, self.row_scope.lines = self.row_scope.lines, []
        for m, acc in zip(reductions, phase.accumulators, strict=True):
            dtype = self.target.in_wgsl(self.builder.buffers[m.output].dtype)
            if isinstance(acc, ExpSum):
                self.values[m.output] = Text(acc.parts[0].name, 1, dtype)
            else:
                value = Text(acc.result(dtype), 1, dtype, acc.narrow(dtype))
                self.values[m.output] = self._as_read(m, fitted(value, self.row_renderer.let))
        return phase

    def _packed_phase(self, phase: RowPass, products: PackedProducts) -> RowPass:
        """The pass of a group of products with packed weights, which the template prints."""
        phase.accumulators = [*products.accumulators()]
        phase.lines, self.row_scope.lines = self.row_scope.lines, products.chosen()
        for m in self.group.members:
            if m.reduction:
                value = Text(products.name(m.output), 1, dtypes.float32)
                self.values[m.output] = self._as_read(m, value)
        self.iterations = self.iterations + products.iterations
        return phase

    def _as_read(self, member: Member, value: Text) -> Text:
        """A member's value per row, as other members read it."""
        bodies = (m.body for m in self.group.members)
        is_read = any(load.buffer == member.output for b in bodies for load in loads_of(b))
        if not is_read or not is_known_sum(member.reduction, value.dtype, self.tiling.threads):
            return value
        return self.row_renderer.let(opaque(value).code, 1, value.dtype)

    def _accumulator(self, member: Member) -> Accumulator | ExpSum:
        """The accumulator of one reduction, or of a maximum together with its sum."""
        name = f"a{self.by_order(member)}"
        for output, own in self.sums.items():
            if own.largest == member.output:
                total = f"a{self.by_order(self.by_name[output])}"
                return exp_sum(name, total, self.tiling.lanes, self.target)
        dtype = self.target.in_wgsl(member.body.dtype)
        return accumulator(name, member.reduction or "", dtype, self.tiling.lanes)

    def _loop_lines(
        self,
        loop: ChunkLoop,
        reductions: Sequence[Member] = (),
        accumulators: Sequence[Accumulator | ExpSum] = (),
        stores: Sequence[Member] = (),
    ) -> list[str]:
        """The statements of a loop over chunks: they update accumulators, and then store results.

        Stores come last: a driver that cannot tell buffers apart moves no load across a store.
        """
        lines: list[str] = []
        last: list[str] = []
        together: list[list[tuple[Text, str | None]]] = [[] for _ in accumulators]
        for chunk, predicate, renderer in loop.chunks:
            own = renderer.scope.lines
            for m, acc, values in zip(reductions, accumulators, together, strict=True):
                value = renderer.render(m.body)
                if isinstance(acc, ExpSum):
                    values.append((value, predicate))
                else:
                    own += acc.update(value, predicate, self._position(chunk))
            for m in stores:
                last += self._store_element(m, renderer, predicate)
            if renderer.wide is not None:
                lines += renderer.wide.lines
                renderer.wide.lines = []
            lines += own
            renderer.scope.lines = []
        for acc, values in zip(accumulators, together, strict=True):
            if isinstance(acc, ExpSum):
                lines += acc.update(values)
        lines += last
        if loop.trips is None or not lines:
            return lines
        self.iterations = self.iterations + loop.trips + 1
        head = f"for (var c = 0; c < {self.builder.trips(loop.trips)}; c++) {{"
        return [head, *(f"  {line}" for line in lines), "}"]

    def by_order(self, member: Member) -> int:
        """A member's position in the group."""
        return list(self.by_name).index(member.output)

    def _final(self) -> list[str]:
        """After the last pass: values per row, then elements that needed the last pass."""
        last = self.phases_count
        self._row_members(last)
        stores = self._element_stores(last)
        body: list[str] = []
        for loop in self._chunk_loops() if stores else ():
            body += self._loop_lines(loop, stores=stores)
        lines = self.row_scope.lines + self._row_stores()
        self.row_scope.lines = []
        return [*lines, *body]

    def _row_members(self, depth: int) -> None:
        """Values per row that are known after ``depth`` passes."""
        for m in self.group.members:
            if m.output in self.varying or self.depth[m.output] != depth:
                continue
            own = self.sums.get(m.output)
            if own is not None:
                acc = self._accumulator(self.by_name[own.largest])
                assert isinstance(acc, ExpSum)
                code = acc.total(self.row_renderer.render(own.shift).code)
                self.values[m.output] = self.row_renderer.let(code, 1, m.body.dtype)
            elif m.reduction is None:
                value = self.row_renderer.render(m.body)
                self.values[m.output] = self.rounding(m.output, value, self.row_renderer.let)

    def _element_stores(self, depth: int) -> list[Member]:
        """Members to be stored whose elements are known after ``depth`` passes."""
        stored = [m for m in self.group.members if m.store and m.output in self.varying]
        return [m for m in stored if self.depth[m.output] == depth]

    def _row_stores(self) -> list[str]:
        stored = [m for m in self.group.members if m.store and m.output not in self.varying]
        if not stored:
            return []
        lines: list[str] = []
        for m in stored:
            lines += self.builder.store(m, self.values[m.output], [self.row_env])
        own = "g == 0" if self._rows_each == 1 else f"g < {self._rows_each}"
        return [f"if (row_ok && {own}) {{", *(f"  {line}" for line in lines), "}"]

    def _store_element(self, m: Member, renderer: Renderer, predicate: str | None) -> list[str]:
        value = renderer.render(Load(m.output, tuple(Index(i) for i in m.index), m.body.dtype))
        lines = self.builder.store(m, value, renderer.lanes)
        guard = [*(["row_ok"] if self._rows_checked else []), *([predicate] if predicate else [])]
        if not guard:
            return lines
        return [f"if ({' && '.join(guard)}) {{", *(f"  {line}" for line in lines), "}"]

    @property
    def _rows_checked(self) -> bool:
        rows = self.tiling.rows * self._rows_each
        workgroups = ceildiv(self.rows, rows)
        exact = fold_grid(workgroups, self.target)[1] is ONE
        return not (exact and workgroups * rows is self.rows)

    @property
    def _rows_each(self) -> int:
        """Rows that invocations compute together."""
        return 1 if self.strategy.packed is None else self.strategy.packed.rows_each

    # -- chunks ----------------------------------------------------------------------------------

    def _chunk_loops(self) -> list[ChunkLoop]:
        """The chunks of the row that an invocation covers: a loop and its rest, or those it keeps.

        A loop over a row of known length has no tests: what is left over follows it.
        """
        t = self.tiling
        step = t.threads * t.lanes
        if t.chunks is not None:
            return [ChunkLoop(None, self._chunks(ZERO, t.chunks))]
        if not self.length.is_constant:
            trips = ceildiv(self.length, step * t.unroll)
            return [self._loop(trips, (self.length % (step * t.unroll)) is ZERO)]
        trips = as_expr(int(self.length) // (step * t.unroll))
        first, end = trips * t.unroll, -(-int(self.length) // (step * t.run)) * t.run
        found = [self._loop(trips, True)] if int(trips) else []
        left = self._chunks(first, end - int(first))
        return [*found, ChunkLoop(None, left)] if left else found

    def _loop(self, trips: Expr, inside: bool) -> ChunkLoop:
        unroll = self.tiling.unroll
        return ChunkLoop(trips, self._chunks(iteration("c", trips) * unroll, unroll, inside))

    def _chunks(self, first: Expr, count: int, inside: bool | None = None) -> tuple[Chunk, ...]:
        """``count`` chunks from index ``first`` on; kept chunks reuse the scopes of earlier passes.

        ``inside`` says of all whether they are within the row; without it, `_inside` of each.
        """
        scopes = {} if self.tiling.chunks is None else self.kept
        found = []
        for k in range(count):
            if k % self.tiling.run == 0:
                wide = Scope(parent=self.row_scope)
            scope = scopes.setdefault(k, Scope(parent=wide))
            is_inside = self._inside(int(first) + k) if inside is None else inside
            found.append(self._chunk(first + k, scope, wide, is_inside))
        return tuple(found)

    def _inside(self, chunk: int) -> bool:
        """Whether the chunk with this index is within the row for every invocation."""
        t = self.tiling
        step = t.threads * t.lanes
        least = value_range(self.length)[0]
        return (chunk // t.run + 1) * t.run * step <= least

    def _position(self, chunk: Expr, lane: int = 0) -> str:
        return self.builder.index(self._element(chunk, lane))

    def _element(self, chunk: Expr, lane: int) -> Expr:
        t = self.tiling
        g = iteration("g", t.threads) if t.threads > 1 else ZERO
        return (((chunk // t.run) * t.threads + g) * t.run + chunk % t.run) * t.lanes + lane

    def _chunk(self, chunk: Expr, scope: Scope, wide: Scope, inside: bool) -> Chunk:
        """``wide``: the scope that neighbouring chunks share."""
        t = self.tiling
        lanes: Lanes = []
        for lane in range(t.lanes):
            index = delinearize(self._element(chunk, lane), self.group.elements)
            lanes.append({**self.row_env, **dict(zip(self.element_symbols, index, strict=True))})
        predicate = None
        if not inside:
            first = chunk // t.run * t.run  # a run is inside as a whole, or outside
            test = f"{self._position(first)} < {self.builder.index(self.length)}"
            shared = wide if t.run > 1 else scope
            named = partial(self.builder.renderer(lanes, shared).let, test, 1, dtypes.bool_)
            predicate = shared.once(("predicate", first), named).code
        renderer: Renderer

        def member(load: Load) -> Text | None:
            found = self.values.get(load.buffer)
            if found is None and load.buffer in self.by_name:
                value = renderer.render(self.by_name[load.buffer].body)
                return self.rounding(load.buffer, value, renderer.let)
            return found

        renderer = self.builder.renderer(
            lanes,
            scope,
            member=member,
            predicate=predicate,
            outer=self.row_renderer,
            belongs_outside=self.outside,
            wide=wide if t.run > 1 else None,
        )
        return chunk, predicate, renderer
