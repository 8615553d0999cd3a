"""Map groups that read and write in different memory orders: tiles in workgroup memory.

Reading column by column takes a whole memory transaction for each element. Here a workgroup reads
a tile along the input's fastest dimension, and computes and writes it along the output's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import dtypes
from ..dtypes import DType
from ..ir.graph import Buffer, MapGroup
from ..ir.scalar import Index, Load, Masked, Scalar, children
from ..ir.spaces import iteration_symbols, symbol_keys
from ..plan.model import KernelCall
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    ceildiv,
    delinearize,
    iteration,
    linearize,
    product,
)
from ..target import Target
from .buffer_access import VECTOR
from .hardening.spelling import exchanged_type
from .kernel import KernelBuilder, fold_grid
from .pointwise import group_flops, group_origins
from .scalar_wgsl import Renderer
from .tiling import TransposeTiling, choose_transpose_tiling
from .values import Scope, Text

# Elements that one step of a symbol moves an access; symbols that do not move it have 0.
Strides = Mapping[Symbol, int]


@dataclass(frozen=True, slots=True)
class Transposition:
    """The dimensions of a map group, split for tiles; each list is in memory order, slowest first.

    Attributes:
        batch: dimensions that a tile has one index of.
        inner: dimensions that are fastest in the inputs ``loads``.
        outer: dimensions that are fastest in the outputs.
        loads: the loads that go through tiles.
    """

    batch: tuple[Symbol, ...]
    inner: tuple[Symbol, ...]
    outer: tuple[Symbol, ...]
    loads: tuple[Load, ...]
    tiling: TransposeTiling


def find_transposition(
    group: MapGroup, buffers: dict[str, Buffer], target: Target
) -> Transposition | None:
    """How the group is tiled; None where its loads follow the order of its stores."""
    symbols = [s for s in symbol_keys(iteration_symbols("i", group.ranges)) if s.extent is not ONE]
    written: list[tuple[Buffer, Strides]] = []
    for member in group.members:
        if member.store:
            strides = _strides(buffers[member.output], member.index, symbols)
            if strides is None:
                return None
            written.append((buffers[member.output], strides))
    outer_order = sorted(symbols, key=lambda s: -written[0][1][s])
    if not symbols or any(strides[outer_order[-1]] != 1 for _, strides in written):
        return None
    read = dict(_affine_loads(group, buffers, symbols))
    last = outer_order[-1]
    strided = [
        load for load, strides in read.items() if strides[last] > 1 and 1 in strides.values()
    ]
    if not strided:
        return None
    main = read[max(strided, key=lambda load: int(buffers[load.buffer].numel))]
    accesses = [*(strides for _, strides in written), *read.values()]
    inner_order = sorted((s for s in symbols if main[s]), key=lambda s: -main[s])
    inner = _run(inner_order, accesses, {last})
    outer = _run(outer_order, accesses, set(inner))
    loads = tuple(load for load in strided if read[load][inner[-1]] == 1)
    lanes = (
        _lanes([(buffers[load.buffer], read[load]) for load in loads], inner),
        _lanes(written, outer),
    )
    if lanes[1] == 1 and any(buffer.dtype.packing > 1 for buffer, _ in written):
        return None  # an invocation should own the words that it stores
    tiling = choose_transpose_tiling(
        _extent_of(inner),
        _extent_of(outer),
        _extent_of(symbols),
        sum(_tile_type(load.dtype)[1] for load in loads),
        target,
        lanes,
    )
    batch = tuple(s for s in outer_order if s not in inner and s not in outer)
    return None if tiling is None else Transposition(batch, inner, outer, loads, tiling)


def _extent_of(symbols: Sequence[Symbol]) -> Expr:
    return product(s.extent for s in symbols if s.extent is not None)


def _strides(buffer: Buffer, index: Sequence[Expr], symbols: Sequence[Symbol]) -> Strides | None:
    """How an access moves, when it is a sum of symbols times numbers; else None."""
    found = dict.fromkeys(symbols, 0)
    for monomial, coefficient in linearize(index, buffer.strides).terms:
        (atom, *others) = monomial
        if others or not isinstance(atom, Symbol) or atom not in found:
            return None
        found[atom] = coefficient
    return found if buffer.numel.is_constant else None


def _affine_loads(
    group: MapGroup, buffers: dict[str, Buffer], symbols: Sequence[Symbol]
) -> Iterator[tuple[Load, Strides]]:
    """Loads of memory that every point makes, at indices that are linear in the symbols."""
    computed = {m.output for m in group.members}
    seen: set[Scalar] = set()
    stack: list[Scalar] = [m.body for m in group.members]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        # What is masked may lie outside of the buffer at other points.
        stack += (node.condition, node.other) if isinstance(node, Masked) else children(node)
        if isinstance(node, Load) and node.buffer not in computed:
            index = [entry.expr for entry in node.index if isinstance(entry, Index)]
            if len(index) == len(node.index):
                strides = _strides(buffers[node.buffer], index, symbols)
                if strides is not None:
                    yield node, strides


def _run(
    order: Sequence[Symbol], accesses: Sequence[Strides], excluded: set[Symbol]
) -> tuple[Symbol, ...]:
    """The fastest dimensions of ``order`` that every access walks through as if they were one."""
    run = [order[-1]]
    for symbol in reversed(order[:-1]):
        extent = int(_extent_of(run[:1]))
        joined = all(strides[symbol] == strides[run[0]] * extent for strides in accesses)
        if symbol in excluded or not joined:
            break
        run.insert(0, symbol)
    return tuple(run)


def _lanes(accesses: Sequence[tuple[Buffer, Strides]], run: Sequence[Symbol]) -> int:
    """Elements along ``run`` that every one of these accesses can move at once."""
    for buffer, strides in accesses:
        steps = [stride for symbol, stride in strides.items() if symbol not in run]
        steps += [int(_extent_of(run)), int(buffer.offset)]
        if buffer.dtype.itemsize > 4 or any(step % VECTOR for step in steps):
            return 1
    return VECTOR


def _tile_type(dtype: DType) -> tuple[str, int]:
    """(WGSL type, bytes) of an element in workgroup memory."""
    return exchanged_type(dtype.compute), {"i64": 8, "f64": 8}.get(dtype.compute, 4)


def generate_transpose(
    group: MapGroup, found: Transposition, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of a map group that goes through tiles."""
    return _TransposeKernel(group, found, KernelBuilder(target, buffers)).generate()


class _TransposeKernel:
    def __init__(self, group: MapGroup, found: Transposition, builder: KernelBuilder) -> None:
        self.group = group
        self.found = found
        self.builder = builder
        tiling = found.tiling
        self.inner, self.outer = _extent_of(found.inner), _extent_of(found.outer)
        self.counts = (
            _extent_of(found.batch),
            ceildiv(self.inner, tiling.inner),
            ceildiv(self.outer, tiling.outer),
        )
        names = ("tile_batch", "tile_inner", "tile_outer")
        self.tile = [iteration(n, c) for n, c in zip(names, self.counts, strict=True)]
        self.tile_names = {load: f"tile{k}" for k, load in enumerate(found.loads)}

    def generate(self) -> KernelCall:
        tiling, builder = self.found.tiling, self.builder
        count = product(self.counts)
        grid = fold_grid(count, builder.target)
        place = delinearize(iteration("tile", count), self.counts)
        where = [
            f"let {name!r} = {builder.index(value)};"
            for name, value in zip(self.tile, place, strict=True)
        ]
        size = tiling.inner * (tiling.outer + 1)
        types = [(name, *_tile_type(load.dtype)) for load, name in self.tile_names.items()]
        return builder.finish(
            "transpose",
            "transpose.wgsl.jinja",
            {
                "workgroup_size": tiling.workgroup,
                "count": builder.index(count),
                "checked": grid[1] is not ONE,
                "tiles": [{"name": name, "type": type_, "size": size} for name, type_, _ in types],
                "load_lines": where + self._load_lines(),
                "store_lines": self._store_lines(),
            },
            workgroup_size=tiling.workgroup,
            grid=grid,
            origins=group_origins(self.group.members),
            flops=group_flops(self.group),
            workgroup_nbytes=sum(size * nbytes for _, _, nbytes in types),
        )

    def _load_lines(self) -> list[str]:
        """Neighbouring invocations read neighbours of ``inner``; all reads come before writes."""
        t = self.found.tiling
        across = t.inner // t.load_lanes
        step = t.workgroup // across
        i, o = iteration("load_inner", across), iteration("load_outer", step)
        lines = [f"let {i!r} = local % {across};", f"let {o!r} = local / {across};"]
        writes: list[str] = []
        for p in range(t.outer // step):
            places = [(i * t.load_lanes + k, o + p * step) for k in range(t.load_lanes)]
            _, renderer = self._renderer(places)
            for load, name in self.tile_names.items():
                value = renderer.render(load)
                for k, place in enumerate(places):
                    code = value.lane(k)
                    if load.dtype is dtypes.bool_:
                        code = f"select(0u, 1u, {code})"
                    writes.append(f"{name}[{self._slot(place)}] = {code};")
            lines += renderer.scope.lines
        return lines + writes

    def _store_lines(self) -> list[str]:
        """Neighbouring invocations compute and write neighbours of ``outer``."""
        t = self.found.tiling
        across = t.outer // t.store_lanes
        step = t.workgroup // across
        o, i = iteration("store_outer", across), iteration("store_inner", step)
        lines = [f"let {o!r} = local % {across};", f"let {i!r} = local / {across};"]
        stores: list[str] = []
        for p in range(t.inner // step):
            places = [(i + p * step, o * t.store_lanes + k) for k in range(t.store_lanes)]
            predicate, renderer = self._renderer(places)
            values: dict[str, Text] = {}
            renderer.member = self._members(values, places, renderer)
            own: list[str] = []
            for member in self.group.members:
                value = values[member.output] = renderer.render(member.body)
                if member.store:
                    own += self.builder.store(member, value, renderer.lanes)
            lines += renderer.scope.lines
            guarded = [f"if ({predicate}) {{", *(f"  {line}" for line in own), "}"]
            stores += guarded if predicate else own
        return lines + stores

    def _renderer(self, places: Sequence[tuple[Expr, Expr]]) -> tuple[str | None, Renderer]:
        """(predicate, renderer) at these (inner, outer) places of the tile."""
        t, found = self.found.tiling, self.found
        batch, inner_tile, outer_tile = self.tile
        lanes: list[dict[Symbol, Expr]] = []
        for i, o in places:
            lane: dict[Symbol, Expr] = {}
            for symbols, position in (
                (found.batch, batch),
                (found.inner, inner_tile * t.inner + i),
                (found.outer, outer_tile * t.outer + o),
            ):
                sizes = [_extent_of([s]) for s in symbols]
                lane.update(zip(symbols, delinearize(position, sizes), strict=True))
            lanes.append(lane)
        scope = Scope()
        i, o = places[0]
        tests = [
            f"{self.builder.index(tile * size + place)} < {self.builder.index(extent)}"
            for tile, size, place, extent in (
                (inner_tile, t.inner, i, self.inner),
                (outer_tile, t.outer, o, self.outer),
            )
            if extent % size is not ZERO
        ]
        predicate = None
        if tests:
            test = self.builder.renderer(lanes, scope).let(" && ".join(tests), 1, dtypes.bool_)
            predicate = test.code
        return predicate, self.builder.renderer(lanes, scope, predicate=predicate)

    def _members(
        self, values: Mapping[str, Text], places: Sequence[tuple[Expr, Expr]], renderer: Renderer
    ) -> Callable[[Load], Text | None]:
        """What is known of loads at these places: tiles and members computed before."""

        def value_of(load: Load) -> Text | None:
            name = self.tile_names.get(load)
            if name is None:
                return values.get(load.buffer)
            codes = [f"{name}[{self._slot(place)}]" for place in places]
            if load.dtype is dtypes.bool_:
                codes = [f"({code} != 0u)" for code in codes]
            if len(codes) > 1:
                codes = [f"vec4<{load.dtype.compute}>({', '.join(codes)})"]
            return renderer.let(codes[0], len(places), load.dtype)

        return value_of

    def _slot(self, place: tuple[Expr, Expr]) -> str:
        i, o = place
        return self.builder.index(i * (self.found.tiling.outer + 1) + o)
