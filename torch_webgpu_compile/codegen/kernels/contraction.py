"""Contractions: matrix multiplication and convolution as one tiled kernel with fused ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...ir.access import VECTOR, is_multiple_of
from ...ir.anchors import anchor_members, contraction_of, load_axes, products_of, store_lanes
from ...ir.buffers import Buffer
from ...ir.graph import AnchorGroup, ContractionGroup, PairGroup
from ...ir.spaces import Origin
from ...plan.model import KernelCall
from ...symbolic.sizes import ZERO, Expr, as_expr, ceildiv, product
from ...target import Target
from ..tilings.matmul import MatmulProblem, MatmulTiling, choose_matmul_tiling, fits
from ..wgsl.literals import zero_of
from .builder import KernelBuilder, fold_grid
from .epilogue import Store, render_epilogue
from .operands import load_operand
from .pointwise import group_origins

Tilings = Mapping[str, MatmulTiling]
"""Measured tilings, by `MatmulProblem.key`."""


def problem_of(group: ContractionGroup, buffers: dict[str, Buffer]) -> MatmulProblem:
    """The problem that a kernel's tiling is chosen for."""
    nodes = [contraction_of(part) for part in products_of(group)]
    (lhs, *_), right = zip(*(load_axes(node, buffers) for node in nodes), strict=True)
    # Element by element suits every layout.
    rhs = right[0] if len(set(right)) == 1 else "scalar_inner"
    paired = isinstance(group, PairGroup)
    shapes = [(product(n.rows), product(n.columns)) for n in (nodes[:1] if paired else nodes)]
    sizes = product(nodes[0].batch), product(nodes[0].inner)
    return MatmulProblem.of(sizes, shapes, nodes[0].lhs.dtype.itemsize, (lhs, rhs), paired)


def generate_contraction(
    group: ContractionGroup, buffers: dict[str, Buffer], target: Target, tilings: Tilings
) -> KernelCall:
    """The kernel of contractions, in the measured tiling if there is one."""
    problem = problem_of(group, buffers)
    tiling = tilings.get(problem.key or "")
    if tiling is None or not fits(tiling, problem.itemsize, target):
        tiling = choose_matmul_tiling(problem, target)
    return generate_tiled(group, buffers, target, problem, tiling)


def generate_tiled(
    group: ContractionGroup,
    buffers: dict[str, Buffer],
    target: Target,
    problem: MatmulProblem,
    tiling: MatmulTiling,
) -> KernelCall:
    """The kernel of contractions and their epilogues in a given tiling."""
    builder = KernelBuilder(target, buffers)
    if problem.key is None or problem.paired or not tiling.is_divisible:
        tiling = replace(tiling, strips=0)
    parts = products_of(group)
    nodes = [contraction_of(part) for part in parts]
    dtype = nodes[0].lhs.dtype
    batch, inner = product(nodes[0].batch), product(nodes[0].inner)
    rows, columns, depth = tiling.rows, problem.columns_of(tiling), tiling.depth
    # An operand that all siblings share is loaded by one function for all.
    one_lhs = len({(node.lhs, node.rows) for node in nodes}) == 1
    one_rhs = len({(node.rhs, node.columns) for node in nodes}) == 1 and not problem.paired
    lhs = [
        load_operand(builder, node, node.lhs, problem.lhs, ("m", node.rows), rows, depth)
        for node in (nodes[:1] if one_lhs else nodes)
    ]
    rhs = [
        load_operand(builder, node, node.rhs, problem.rhs, ("n", node.columns), columns, depth)
        for node in (nodes[:1] if one_rhs else nodes)
    ]
    stored = [parts] if problem.paired else [(part,) for part in parts]
    shapes = [
        (product(node.rows), product(node.columns))
        for node in map(contraction_of, (together[0] for together in stored))
    ]
    regions = _regions(builder, batch, shapes, tiling, columns)
    return builder.finish(
        "matmul",
        "matmul.wgsl.jinja",
        {
            "type": dtype.compute,
            "zero": zero_of(dtype),
            "tiling": tiling,
            "paired": problem.paired,
            "columns": columns,
            "lhs": lhs,
            "rhs": rhs,
            "stores": [_store(builder, together, rows, columns) for together in stored],
            "memory_size": tiling.workgroup_nbytes(dtype.itemsize) // (VECTOR * dtype.itemsize),
            "regions": [region.shown for region in regions],
            "small_from": len(shapes),
            "inner_count": builder.index(inner),
        },
        workgroup_size=tiling.workgroup,
        grid=fold_grid(regions[-1].end, target),
        origins=_origins(parts),
        flops=batch * inner * 2 * sum((product((*n.rows, *n.columns)) for n in nodes), ZERO),
        workgroup_nbytes=tiling.workgroup_nbytes(dtype.itemsize),
        iterations=_iterations(inner, tiling),
    )


def _iterations(inner: Expr, tiling: MatmulTiling) -> Expr:
    """Of the loop over tiles, with the loop that multiplies one in each; both end with a test."""
    in_tile = ceildiv(tiling.inner, tiling.unroll) + 1 if tiling.inner > tiling.unroll else ZERO
    depth = tiling.inner * tiling.slices
    depth = min(depth, tiling.small.depth) if tiling.strips else depth
    return (ceildiv(inner, depth) + 1) * (in_tile + 1)


@dataclass(frozen=True, slots=True)
class Region:
    """Tiles of one size in one product.

    Attributes:
        end: the number of the first workgroup behind it.
        shown: what the template is told.
    """

    end: Expr
    shown: Mapping[str, str | int]


def _regions(
    builder: KernelBuilder,
    batch: Expr,
    shapes: Sequence[tuple[Expr, Expr]],
    tiling: MatmulTiling,
    columns: int,
) -> list[Region]:
    """Every product in large tiles of ``columns``; then what they leave of it in small ones."""
    found: list[Region] = []

    def add(part: int, tiles_m: Expr, tiles_n: Expr, first: Expr) -> None:
        end = (found[-1].end if found else ZERO) + batch * tiles_m * tiles_n
        counts = {"tiles_m": tiles_m, "tiles_n": tiles_n, "first_column": first, "end": end}
        shown = {name: builder.index(value) for name, value in counts.items()}
        found.append(Region(end, {"part": part, **shown}))

    large = [ceildiv(width, columns) for _, width in shapes]
    if tiling.strips:
        large = [as_expr(max(0, int(tiles_n) - tiling.strips)) for tiles_n in large]
    for part, (height, _) in enumerate(shapes):
        add(part, ceildiv(height, tiling.rows), large[part], ZERO)
    small = tiling.small
    for part, (height, width) in enumerate(shapes if tiling.strips else ()):
        first = large[part] * columns
        add(part, ceildiv(height, small.rows), ceildiv(width - first, small.columns), first)
    return found


def _origins(parts: Sequence[AnchorGroup]) -> list[Origin]:
    return [
        origin for part in parts for origin in (*part.anchor.origins, *group_origins(part.epilogue))
    ]


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
    return Store(len(lanes), lines, " && ".join(guards))
