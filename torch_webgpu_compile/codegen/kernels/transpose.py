"""Map groups that read and write in different memory orders: tiles in workgroup memory.

Reading column by column takes a whole memory transaction for each element. Here a workgroup reads
a tile along the input's fastest dimension, and computes and writes it along the output's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ... import dtypes
from ...ir.access import workgroup_type
from ...ir.buffers import Buffer
from ...ir.graph import MapGroup
from ...ir.scalar import Load
from ...ir.transposition import Transposition, extent_of
from ...plan.model import KernelCall
from ...symbolic.sizes import ONE, ZERO, Expr, Symbol, ceildiv, delinearize, iteration, product
from ...target import Target
from ..hardening.spelling import all_of
from ..values import Scope, Text, in_lanes
from ..wgsl.scalars import Renderer
from .builder import KernelBuilder, fold_grid
from .pointwise import group_flops, group_origins


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
        self.inner, self.outer = extent_of(found.inner), extent_of(found.outer)
        self.counts = (
            extent_of(found.batch),
            ceildiv(self.inner, tiling.inner),
            ceildiv(self.outer, tiling.outer),
        )
        names = ("tile_batch", "tile_inner", "tile_outer")
        self.tile = [iteration(n, c) for n, c in zip(names, self.counts, strict=True)]
        self.tile_names = {load: f"tile{k}" for k, load in enumerate(found.loads)}

    def generate(self) -> KernelCall:
        tiling, builder = self.found.tiling, self.builder
        count = product(self.counts)
        place = delinearize(iteration("tile", count), self.counts)
        where = [
            f"let {name!r} = {builder.index(value)};"
            for name, value in zip(self.tile, place, strict=True)
        ]
        size = tiling.inner * (tiling.outer + 1)
        types = [
            (name, *workgroup_type(builder.target.in_wgsl(load.dtype)))
            for load, name in self.tile_names.items()
        ]
        return builder.finish(
            "transpose",
            {
                "count": builder.index(count),
                "checked": fold_grid(count, builder.target)[1] is not ONE,
                "tiles": [{"name": name, "type": type_, "size": size} for name, type_, _ in types],
                "load_lines": where + self._load_lines(),
                "store_lines": self._store_lines(),
            },
            workgroup_size=tiling.workgroup,
            workgroups=count,
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
        """Statements: neighbouring invocations compute and write neighbours of ``outer``."""
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
                sizes = [extent_of([s]) for s in symbols]
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
            test = self.builder.renderer(lanes, scope).let(all_of(tests), 1, dtypes.bool_)
            predicate = test.code
        return predicate, self.builder.renderer(lanes, scope, predicate=predicate)

    def _members(
        self, values: Mapping[str, Text], places: Sequence[tuple[Expr, Expr]], renderer: Renderer
    ) -> Callable[[Load], Text | None]:
        """Values of loads that are known at these places: tiles, and members computed before."""

        def value_of(load: Load) -> Text | None:
            name = self.tile_names.get(load)
            if name is None:
                return values.get(load.buffer)
            codes = [f"{name}[{self._slot(place)}]" for place in places]
            if load.dtype is dtypes.bool_:
                codes = [f"({code} != 0u)" for code in codes]
            dtype = renderer.in_wgsl(load.dtype)
            code = in_lanes(dtype, codes) if len(codes) > 1 else codes[0]
            return renderer.let(code, len(places), dtype)

        return value_of

    def _slot(self, place: tuple[Expr, Expr]) -> str:
        i, o = place
        return self.builder.index(i * (self.found.tiling.outer + 1) + o)
