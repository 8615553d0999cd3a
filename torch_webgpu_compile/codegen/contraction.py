"""Contractions: matrix multiplication and convolution as one tiled kernel with fused ends."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..ir.graph import AnchorGroup, Buffer, Member, SiblingGroup
from ..ir.nodes import Contraction, Origin, iteration_symbols, symbol_keys
from ..ir.scalar import Index, Load, Scalar, loads_of
from ..plan.model import KernelCall
from ..sizes import (
    ONE,
    ZERO,
    Expr,
    Symbol,
    ceildiv,
    delinearize,
    iteration,
    linearize,
    product,
    substitute,
    symbols_of,
)
from ..target import Target
from .index_wgsl import are_aligned_neighbours, is_multiple_of
from .kernel import KernelBuilder, fold_grid, lane_addresses
from .literals import zero_of
from .matmul_tiling import MatmulProblem, MatmulTiling, choose_matmul_tiling, fits
from .pointwise import Lanes, group_origins, render_members
from .storage import VECTOR
from .values import Scope, Text


@dataclass(frozen=True, slots=True)
class Operand:
    """How a tile of an operand is loaded; see ``templates/matmul.wgsl.jinja``."""

    axis: str
    lines: list[str]
    result: str
    guard: str


@dataclass(frozen=True, slots=True)
class Store:
    """What happens to an element, or four neighbouring columns, of the result."""

    lanes: int
    lines: list[str]
    guard: str


Tilings = Mapping[str, MatmulTiling]
"""Measured tilings, by `MatmulProblem.key`."""


def kernels_of(
    group: AnchorGroup | SiblingGroup, buffers: dict[str, Buffer], target: Target
) -> list[tuple[AnchorGroup, ...]]:
    """The contractions of each kernel: siblings whose tiles are loaded and stored alike share."""
    if isinstance(group, AnchorGroup):
        return [(group,)]
    builder = KernelBuilder(target, buffers)
    found: dict[Hashable, list[AnchorGroup]] = {}
    for sibling in group.groups:
        node = contraction_of(sibling)
        lanes = len(_store_lanes(builder, sibling, node))
        found.setdefault((_axes(builder, node), lanes), []).append(sibling)
    return [tuple(siblings) for siblings in found.values()]


def contraction_of(group: AnchorGroup) -> Contraction:
    """The anchor of a contraction's group."""
    assert isinstance(group.anchor, Contraction)
    return group.anchor


def problem_of(
    siblings: Sequence[AnchorGroup], buffers: dict[str, Buffer], target: Target
) -> MatmulProblem:
    """The problem that a kernel's tiling is chosen for; ``siblings``: see `kernels_of`."""
    nodes = [contraction_of(group) for group in siblings]
    first = nodes[0]
    shapes = [(product(node.rows), product(node.columns)) for node in nodes]
    axes = _axes(KernelBuilder(target, buffers), first)
    batch, inner = product(first.batch), product(first.inner)
    return MatmulProblem.of(batch, shapes, inner, first.lhs.dtype.itemsize, axes)


def generate_contraction(
    siblings: Sequence[AnchorGroup], buffers: dict[str, Buffer], target: Target, tilings: Tilings
) -> KernelCall:
    """The kernel of contractions and their epilogues, in the measured tiling if there is one."""
    problem = problem_of(siblings, buffers, target)
    tiling = tilings.get(problem.key or "")
    if tiling is None or not fits(tiling, problem.itemsize, target):
        tiling = choose_matmul_tiling(problem, target)
    return generate_tiled(siblings, buffers, target, problem, tiling)


def generate_tiled(
    siblings: Sequence[AnchorGroup],
    buffers: dict[str, Buffer],
    target: Target,
    problem: MatmulProblem,
    tiling: MatmulTiling,
) -> KernelCall:
    """The kernel of contractions and their epilogues in a given tiling."""
    builder = KernelBuilder(target, buffers)
    nodes = [contraction_of(group) for group in siblings]
    dtype = nodes[0].lhs.dtype
    batch, inner = product(nodes[0].batch), product(nodes[0].inner)
    depth = tiling.inner * tiling.slices
    # An operand that all siblings share is loaded by one function for all.
    left = {(node.lhs, node.rows): node for node in nodes}
    right = {(node.rhs, node.columns): node for node in nodes}
    lhs = [
        _operand(builder, node, node.lhs, problem.lhs, ("m", node.rows), tiling.rows, depth)
        for node in (nodes if len(left) > 1 else nodes[:1])
    ]
    rhs = [
        _operand(builder, node, node.rhs, problem.rhs, ("n", node.columns), tiling.columns, depth)
        for node in (nodes if len(right) > 1 else nodes[:1])
    ]
    stores = [_store(builder, group, tiling.rows, tiling.columns) for group in siblings]
    tiles = [
        (ceildiv(product(node.rows), tiling.rows), ceildiv(product(node.columns), tiling.columns))
        for node in nodes
    ]
    ends = list(accumulate(batch * tiles_m * tiles_n for tiles_m, tiles_n in tiles))
    return builder.finish(
        "matmul",
        "matmul.wgsl.jinja",
        {
            "type": dtype.compute,
            "zero": zero_of(dtype),
            "tiling": tiling,
            "lhs": lhs,
            "rhs": rhs,
            "stores": stores,
            "tiles": [(builder.index(m), builder.index(n)) for m, n in tiles],
            "ends": [builder.index(end) for end in ends],
            "inner_count": builder.index(inner),
        },
        workgroup_size=tiling.workgroup,
        grid=fold_grid(ends[-1], target),
        origins=_origins(siblings),
        flops=batch * inner * 2 * sum((product((*n.rows, *n.columns)) for n in nodes), ZERO),
        workgroup_nbytes=tiling.workgroup_nbytes(dtype.itemsize),
    )


def _origins(siblings: Sequence[AnchorGroup]) -> list[Origin]:
    return [
        origin
        for group in siblings
        for origin in (*group.anchor.origins, *group_origins(group.epilogue))
    ]


def flat_values(prefix: str, sizes: Sequence[Expr], flat: Expr) -> dict[Symbol, Expr]:
    """The values of ``prefix0, prefix1, …`` at flat position ``flat``."""
    symbols = symbol_keys(iteration_symbols(prefix, sizes))
    return dict(zip(symbols, delinearize(flat, sizes), strict=True))


def _operand(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    axis: str,
    outer: tuple[str, Sequence[Expr]],
    tile: int,
    inner_tile: int,
) -> Operand:
    prefix, outer_sizes = outer
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    batch = flat_values("b", node.batch, iteration("b", product(node.batch)))

    def environment(o: Expr, i: Expr) -> dict[Symbol, Expr]:
        return {
            **batch,
            **flat_values(prefix, outer_sizes, o),
            **flat_values("k", node.inner, i),
        }

    lanes: Lanes
    if axis == "inner":
        o = iteration(prefix, outer_count)
        i = iteration("k", ceildiv(inner_count, VECTOR))
        lanes = [environment(o, i * VECTOR + x) for x in range(VECTOR)]
        limits = (outer_count, inner_count // VECTOR)
    elif axis == "outer":
        o = iteration(prefix, ceildiv(outer_count, VECTOR))
        i = iteration("k", inner_count)
        lanes = [environment(o * VECTOR + x, i) for x in range(VECTOR)]
        limits = (outer_count // VECTOR, inner_count)
    else:
        lanes = [environment(iteration(prefix, outer_count), iteration("k", inner_count))]
        limits = (outer_count, inner_count)
    scope = Scope()
    value = builder.renderer(lanes, scope).render(body)
    guards = []
    if not is_multiple_of(outer_count, tile):
        guards.append(f"{prefix} < {builder.index(limits[0])}")
    if not is_multiple_of(inner_count, inner_tile):
        guards.append(f"k < {builder.index(limits[1])}")
    return Operand(axis, scope.lines, value.widen(len(lanes)), " && ".join(guards))


def _axes(builder: KernelBuilder, node: Contraction) -> tuple[str, str]:
    """How lhs and rhs are loaded."""
    return (
        _choose_axis(builder, node, node.lhs, "m", node.rows),
        _choose_axis(builder, node, node.rhs, "n", node.columns),
    )


def _choose_axis(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    prefix: str,
    outer_sizes: Sequence[Expr],
) -> str:
    """Which neighbours an invocation loads at once: along the inner or the outer dimension."""
    outer_count, inner_count = product(outer_sizes), product(node.inner)
    steps = {}
    for axis, name, sizes, count in (
        ("inner", "k", node.inner, inner_count),
        ("outer", prefix, outer_sizes, outer_count),
    ):
        if is_multiple_of(count, VECTOR):
            flat = iteration("flat", count // VECTOR)
            lanes = [flat_values(name, sizes, flat * VECTOR + x) for x in range(VECTOR)]
            if _contiguous(builder, body, lanes):
                return axis
        first = flat_values(name, sizes, iteration("flat", count))
        steps[axis] = _smallest_step(builder, body, first)
    return "scalar_inner" if steps["inner"] <= steps["outer"] else "scalar_outer"


def _addresses(builder: KernelBuilder, body: Scalar) -> list[Expr]:
    """Addresses of the loads with the largest buffer: the operand itself, not masks or scales."""
    loads = [o for o in loads_of(body) if all(isinstance(i, Index) for i in o.index)]
    rank = max((len(o.index) for o in loads), default=0)
    found = []
    for load in loads:
        if len(load.index) == rank:
            buffer = builder.buffers[load.buffer]
            exprs = [i.expr for i in load.index if isinstance(i, Index)]
            found.append(linearize(exprs, buffer.strides) + buffer.offset)
    return found


def _contiguous(builder: KernelBuilder, body: Scalar, lanes: Lanes) -> bool:
    addresses = _addresses(builder, body)
    return bool(addresses) and all(
        are_aligned_neighbours([substitute(a, env) for env in lanes]) for a in addresses
    )


def _smallest_step(builder: KernelBuilder, body: Scalar, env: dict[Symbol, Expr]) -> int:
    """The distance in memory between two neighbours, 2³⁰ when unknown."""
    smallest = 1 << 30
    flat = next((s for e in env.values() for s in _flat_symbols(e)), None)
    if flat is None:
        return smallest
    for address in _addresses(builder, body):
        at = substitute(address, env)
        step = substitute(at, {flat: ONE}) - substitute(at, {flat: ZERO})
        if step.is_constant and step.constant:
            smallest = min(smallest, abs(step.constant))
    return smallest


def _flat_symbols(expr: Expr) -> list[Symbol]:
    return [s for s in symbols_of(expr) if s.name == "flat"]


def _store_lanes(builder: KernelBuilder, group: AnchorGroup, node: Contraction) -> Lanes:
    """The points that an invocation stores at once: four neighbouring columns, or one."""
    columns = product(node.columns)

    def environment(n: Expr) -> dict[Symbol, Expr]:
        return {
            **flat_values("b", node.batch, iteration("b", product(node.batch))),
            **flat_values("m", node.rows, iteration("m", product(node.rows))),
            **flat_values("n", node.columns, n),
        }

    if is_multiple_of(columns, VECTOR):
        quad = iteration("n", columns // VECTOR)
        lanes = [environment(quad * VECTOR + x) for x in range(VECTOR)]
        members = anchor_members(group, node.output, node.index, builder)
        if all(store_is_vector(builder, m, lanes) for m in members if m.store):
            return lanes
    return [environment(iteration("n", columns))]


def _store(builder: KernelBuilder, group: AnchorGroup, tile_m: int, tile_n: int) -> Store:
    node = contraction_of(group)
    rows, columns = product(node.rows), product(node.columns)
    lanes = _store_lanes(builder, group, node)
    members = anchor_members(group, node.output, node.index, builder)
    lines = render_epilogue(builder, members, node.output, lanes)
    guards = []
    if not is_multiple_of(rows, tile_m):
        guards.append(f"m < {builder.index(rows)}")
    if not is_multiple_of(columns, tile_n):
        guards.append(f"n < {builder.index(columns // len(lanes))}")
    return Store(len(lanes), lines, " && ".join(guards))


def anchor_members(
    group: AnchorGroup, output: str, index: tuple[Expr, ...], builder: KernelBuilder
) -> list[Member]:
    """The epilogue, led by the anchor's own result when that is stored."""
    if not group.store_anchor:
        return list(group.epilogue)
    load: Scalar = Load(output, tuple(Index(i) for i in index), builder.buffers[output].dtype)
    return [Member(output, load, index, True), *group.epilogue]


def render_epilogue(
    builder: KernelBuilder, members: Sequence[Member], output: str, lanes: Lanes
) -> list[str]:
    """Statements that turn ``value`` (the anchor's result) into all stored members."""
    result = Text("value", len(lanes), builder.buffers[output].dtype)
    return render_members(builder, members, lanes, known={output: result})


def store_is_vector(builder: KernelBuilder, member: Member, lanes: Lanes) -> bool:
    """Whether the lanes of a store are four aligned neighbours in memory."""
    buffer = builder.buffers[member.output]
    return are_aligned_neighbours(lane_addresses(buffer, member.index, lanes))
