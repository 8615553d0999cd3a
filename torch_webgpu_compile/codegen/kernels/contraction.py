"""Contractions: matrix multiplication and convolution as one tiled kernel with fused ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir.access import VECTOR, flat_values, is_multiple_of
from ...ir.anchors import anchor_members, contraction_of, products_of, store_lanes
from ...ir.buffers import Buffer
from ...ir.factors import BYTES
from ...ir.graph import AnchorGroup, ContractionGroup
from ...ir.nodes import Contraction
from ...ir.scalar import Index, Scalar, loads_of
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import ZERO, Expr, as_expr, ceildiv, iteration, product, symbols_of
from ...target import Target
from ..hardening.spelling import all_of
from ..tilings.contraction import (
    ContractionTiling,
    access_run,
    computes_shifted,
    has_shifts,
    shifted,
)
from ..tilings.matmul import FewRowsTiling, MatmulProblem, MatmulTiling
from ..tilings.units import BFLOAT16_PASSES, MOST_MISSED, UnitsTiling, dialect_of
from ..wgsl.literals import zero_of
from .builder import KernelBuilder
from .epilogue import Store, render_epilogue
from .operands import TileLoad, load_operand
from .pointwise import group_origins
from .words import load_words

_PACKED_RUN = 4  # fours of elements of a byte or less that 16 bytes have, at least
# Tiles that a workgroup looks at together, where few of them have anything to compute: it has
# registers for one, so that an H100 has only two on a multiprocessor.
_RARE_TILES = 8
_DOT = {"i8": "dot4I8Packed", "u8": "dot4U8Packed"}


def generate_contraction(
    group: ContractionGroup,
    problem: MatmulProblem,
    buffers: dict[str, Buffer],
    target: Target,
    tiling: ContractionTiling,
) -> KernelCall:
    """The kernel of contractions and their epilogues in a given tiling; see `problem_of`."""
    if computes_shifted(group, tiling):
        group, problem = shifted(group, problem)
    kernel = _ProductKernel(group, KernelBuilder(target, buffers), problem)
    match tiling:
        case FewRowsTiling():
            return kernel.of_few_rows(tiling)
        case MatmulTiling():
            return kernel.tiled(tiling)
        case UnitsTiling():
            return kernel.in_units(tiling)


class _ProductKernel:
    """The common part of contractions' kernels, however they divide their work."""

    def __init__(
        self, group: ContractionGroup, builder: KernelBuilder, problem: MatmulProblem
    ) -> None:
        self.group, self.builder, self.problem = group, builder, problem
        self.parts = products_of(group)
        self.nodes = [contraction_of(part) for part in self.parts]
        self.batch, self.inner = product(self.nodes[0].batch), product(self.nodes[0].inner)
        if problem.factor in BYTES:
            self.inner = ceildiv(self.inner, VECTOR)
        self.stored = [self.parts] if problem.paired else [(part,) for part in self.parts]

    def tiled(self, tiling: MatmulTiling) -> KernelCall:
        """The kernel in which invocations multiply tiles."""
        problem = self.problem
        nbytes = tiling.workgroup_nbytes(problem.itemsize, problem.axes)
        return self._finish(
            "matmul",
            (tiling.rows, problem.columns_of(tiling), tiling.depth),
            tiling if tiling.strips else None,
            {
                "tiling": tiling,
                "columns": problem.columns_of(tiling),
                "memory_size": nbytes // (VECTOR * problem.itemsize),
                "small_from": len(self.stored),
            },
            tiling.workgroup,
            nbytes,
            _iterations(self.inner, tiling),
        )

    def in_units(self, tiling: UnitsTiling) -> KernelCall:
        """The kernel in which matrix units multiply."""
        problem = self.problem
        width = problem.columns_of(tiling)
        is_bfloat16 = tiling.factor == "bf16"
        passes = 1 + BFLOAT16_PASSES if is_bfloat16 else 1
        tiles_at_once = _RARE_TILES if is_bfloat16 and has_shifts(self.group) else 1
        return self._finish(
            "matmul_units",
            (tiling.rows, width, tiling.inner),
            None,
            {
                "tiling": tiling,
                "columns": width,
                "dialect": dialect_of(self.builder.target),
                "has_windows": any(map(_has_windows, self.nodes)),
                "most_missed": MOST_MISSED,
                "shifts": self._shifts(),
                "tiles_at_once": tiles_at_once,
            },
            tiling.workgroup,
            tiling.workgroup_nbytes(problem.axes),
            (ceildiv(self.inner, tiling.inner) + 1) * passes * tiles_at_once,
            (1, self._packed_run(tiling)),
            element="" if problem.factor in BYTES else tiling.factor,
            tiles_at_once=tiles_at_once,
        )

    def _packed_run(self, tiling: UnitsTiling) -> int:
        """Fours of a dequantized weight that one access holds and a call loads together, or 1."""
        problem = self.problem
        if problem.rhs != "inner" or problem.factor in (*BYTES, "bf16"):
            return 1
        run = access_run(self.group, self.builder.buffers)
        if run < _PACKED_RUN:
            return 1
        run = min(run, tiling.inner // VECTOR)
        step = VECTOR * run
        return run if tiling.inner % step == 0 and problem.divides_inner(step) else 1

    def of_few_rows(self, tiling: FewRowsTiling) -> KernelCall:
        """The kernel without tiles."""
        return self._finish(
            "few_rows",
            (tiling.rows, tiling.columns * tiling.groups, VECTOR * tiling.run),
            None,
            {"tiling": tiling},
            tiling.workgroup,
            tiling.terms(2 if self.problem.paired else 1) * self.problem.itemsize,
            ceildiv(self.inner, VECTOR * tiling.run * tiling.threads) + tiling.threads + 2,
            (tiling.run, tiling.run),
        )

    def _finish(
        self,
        template: str,
        tile: tuple[int, int, int],
        divided: MatmulTiling | None,
        inputs: dict[str, Any],
        workgroup: int,
        workgroup_nbytes: int,
        iterations: Expr,
        runs: tuple[int, int] = (1, 1),
        element: str = "",
        tiles_at_once: int = 1,
    ) -> KernelCall:
        """The kernel.

        Args:
            tile: rows, columns of each product, and elements of the inner dimension, or words of
                bytes, that a workgroup takes.
            divided: the tiling, where the last columns are in smaller tiles.
            inputs: of the template, besides those of all kernels.
            runs: `TileLoad.run` of lhs and of rhs.
            element: the WGSL type of what is loaded, where it is not a word or that of the sums.
            tiles_at_once: that a workgroup looks at, if it computes few of them.
        """
        builder, problem, nodes = self.builder, self.problem, self.nodes
        rows, columns, depth = tile
        dtype = nodes[0].lhs.dtype
        element = element or ("u32" if problem.factor in BYTES else dtype.compute)
        lhs = self._loads("lhs", rows, depth, runs[0], element)
        rhs = self._loads("rhs", columns, depth, runs[1], element)
        shapes = [
            (product(node.rows), product(node.columns))
            for node in (contraction_of(together[0]) for together in self.stored)
        ]
        regions, workgroups = _regions(builder, self.batch, shapes, (rows, columns), divided)
        results = sum((product((*n.rows, *n.columns)) for n in nodes), ZERO)
        return builder.finish(
            "matmul",
            {
                **inputs,
                "type": dtype.compute,
                "zero": zero_of(dtype),
                "element": element,
                "dot": _DOT.get(problem.factor, ""),
                "paired": problem.paired,
                "lhs": lhs,
                "rhs": rhs,
                "stores": [_store(builder, together, rows, columns) for together in self.stored],
                "regions": regions,
                "inner_count": builder.index(self.inner),
            },
            workgroup_size=workgroup,
            workgroups=ceildiv(workgroups, tiles_at_once),
            origins=[
                origin
                for part in self.parts
                for origin in (*part.anchor.origins, *group_origins(part.epilogue))
            ],
            flops=ZERO if tiles_at_once > 1 else self.batch * product(nodes[0].inner) * 2 * results,
            workgroup_nbytes=workgroup_nbytes,
            iterations=iterations,
            template=template,
        )

    def _shifts(self) -> list[dict[str, dict[str, Any]]]:
        """How the shifts of each product are loaded; none where they have none."""
        return [
            {
                side: self._shift(node, shift, prefix, sizes)
                for side, shift, prefix, sizes in (
                    ("lhs", node.lhs_shift, "m", node.rows),
                    ("rhs", node.rhs_shift, "n", node.columns),
                )
                if shift is not None
            }
            for node in self.nodes
            if node.lhs_shift is not None
        ]

    def _shift(
        self, node: Contraction, shift: Scalar, prefix: str, sizes: Sequence[Expr]
    ) -> dict[str, Any]:
        count = product(sizes)
        batch = flat_values("b", node.batch, iteration("b", product(node.batch)))
        point = {**batch, **flat_values(prefix, sizes, iteration(prefix, count))}
        load = self.builder.compute(shift, [point])
        return {"count": self.builder.index(count), "load": load}

    def _loads(self, side: str, tile: int, depth: int, run: int, element: str) -> list[TileLoad]:
        """How the operands of a side, "lhs" or "rhs", are loaded in tiles of these sizes."""
        builder, problem = self.builder, self.problem
        if side == "lhs":
            axis, given = problem.lhs, [(n.lhs, ("m", n.rows)) for n in self.nodes]
        else:
            axis, given = problem.rhs, [(n.rhs, ("n", n.columns)) for n in self.nodes]
        # An operand that all siblings share is loaded by one function for all.
        if len({*given}) == 1 and not (side == "rhs" and problem.paired):
            given = given[:1]
        found = zip(self.nodes, given, strict=False)
        if problem.factor in BYTES:
            return [load_words(builder, node, *one, axis, tile, depth) for node, one in found]
        return [
            load_operand(builder, node, *one, axis, tile, depth, run, element)
            for node, one in found
        ]


def _has_windows(node: Contraction) -> bool:
    """Whether an operand is read at sums of outer and inner positions, as convolutions read."""
    inner = set(numbered("k", node.inner))
    outer = {*numbered("m", node.rows), *numbered("n", node.columns)}
    entries = (
        set(symbols_of(entry.expr))
        for operand in (node.lhs, node.rhs)
        for load in loads_of(operand)
        for entry in load.index
        if isinstance(entry, Index)
    )
    return any(symbols & inner and symbols & outer for symbols in entries)


def _iterations(inner: Expr, tiling: MatmulTiling) -> Expr:
    """Of the loop over tiles, with the loop that multiplies one in each; both end with a test."""
    in_tile = ceildiv(tiling.inner, tiling.unroll) + 1 if tiling.inner > tiling.unroll else ZERO
    depth = tiling.inner * tiling.slices
    depth = min(depth, tiling.small.depth) if tiling.strips else depth
    return (ceildiv(inner, depth) + 1) * (in_tile + 1)


def _regions(
    builder: KernelBuilder,
    batch: Expr,
    shapes: Sequence[tuple[Expr, Expr]],
    tile: tuple[int, int],
    divided: MatmulTiling | None,
) -> tuple[list[dict[str, str | int]], Expr]:
    """Regions, tiles of one size in one product, for the template, and the workgroups of all.

    They are every product in tiles of so many rows and columns, and then what is left of it in
    small ones. ``divided``: the tiling, where something is left.
    """
    rows, columns = tile
    found: list[dict[str, str | int]] = []
    end = ZERO

    def add(part: int, tiles_m: Expr, tiles_n: Expr, first: Expr) -> None:
        nonlocal end
        end = end + batch * tiles_m * tiles_n
        counts = {"tiles_m": tiles_m, "tiles_n": tiles_n, "first_column": first, "end": end}
        shown = {name: builder.index(value) for name, value in counts.items()}
        found.append({"part": part, **shown})

    large = [ceildiv(width, columns) for _, width in shapes]
    if divided is not None:
        large = [as_expr(max(0, int(tiles_n) - divided.strips)) for tiles_n in large]
    for part, (height, _) in enumerate(shapes):
        add(part, ceildiv(height, rows), large[part], ZERO)
    if divided is not None:
        small = divided.small
        for part, (height, width) in enumerate(shapes):
            first = large[part] * columns
            add(part, ceildiv(height, small.rows), ceildiv(width - first, small.columns), first)
    return found, end


def _store(
    builder: KernelBuilder, together: Sequence[AnchorGroup], tile_m: int, tile_n: int
) -> Store:
    """What becomes of a product, or of the two of a pair, at one point."""
    node = contraction_of(together[0])
    rows, columns = product(node.rows), product(node.columns)
    lanes = store_lanes(together, builder.buffers)
    outputs = [part.anchor.output for part in together]
    results = dict(zip(outputs, ("value", "other"), strict=False))
    lines = render_epilogue(builder, anchor_members(together, builder.buffers), results, lanes)
    guards = []
    if not is_multiple_of(rows, tile_m):
        guards.append(f"m < {builder.index(rows)}")
    if not is_multiple_of(columns, tile_n):
        guards.append(f"n < {builder.index(columns // len(lanes))}")
    return Store(len(lanes), lines, all_of(guards))
