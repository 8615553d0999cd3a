"""Contractions: matrix multiplication and convolution as one tiled kernel with fused ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ir.graph import AnchorGroup, Buffer, Member
from ..ir.nodes import Contraction, iteration_symbols, symbol_keys
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


def problem_of(group: AnchorGroup, buffers: dict[str, Buffer], target: Target) -> MatmulProblem:
    """The problem that a contraction's tiling is chosen for."""
    node = group.anchor
    assert isinstance(node, Contraction)
    builder = KernelBuilder(target, buffers)
    sizes = (product(node.batch), product(node.rows), product(node.columns), product(node.inner))
    lhs = _choose_axis(builder, node, node.lhs, "m", node.rows)
    rhs = _choose_axis(builder, node, node.rhs, "n", node.columns)
    return MatmulProblem.of(sizes, node.lhs.dtype.itemsize, lhs, rhs)


def generate_contraction(
    group: AnchorGroup, buffers: dict[str, Buffer], target: Target, tilings: Tilings
) -> KernelCall:
    """The kernel of a contraction and its epilogue, in the measured tiling if there is one."""
    problem = problem_of(group, buffers, target)
    tiling = tilings.get(problem.key or "")
    if tiling is None or not fits(tiling, problem.itemsize, target):
        tiling = choose_matmul_tiling(problem, target)
    return generate_tiled(group, buffers, target, problem, tiling)


def generate_tiled(
    group: AnchorGroup,
    buffers: dict[str, Buffer],
    target: Target,
    problem: MatmulProblem,
    tiling: MatmulTiling,
) -> KernelCall:
    """The kernel of a contraction and its epilogue in a given tiling."""
    node = group.anchor
    assert isinstance(node, Contraction)
    builder = KernelBuilder(target, buffers)
    batch, rows, columns, inner = (
        product(sizes) for sizes in (node.batch, node.rows, node.columns, node.inner)
    )
    dtype = node.lhs.dtype
    tiles_m, tiles_n = ceildiv(rows, tiling.rows), ceildiv(columns, tiling.columns)
    depth = tiling.inner * tiling.slices
    lhs = _operand(builder, node, node.lhs, problem.lhs, ("m", node.rows), tiling.rows, depth)
    rhs = _operand(builder, node, node.rhs, problem.rhs, ("n", node.columns), tiling.columns, depth)
    store = _store(builder, group, node, tiling.rows, tiling.columns)
    total = batch * tiles_m * tiles_n
    return builder.finish(
        "matmul",
        "matmul.wgsl.jinja",
        {
            "type": dtype.compute,
            "zero": zero_of(dtype),
            "tiling": tiling,
            "lhs": lhs,
            "rhs": rhs,
            "store": store,
            "total": builder.index(total),
            "tiles_m": builder.index(tiles_m),
            "tiles_n": builder.index(tiles_n),
            "inner_count": builder.index(inner),
        },
        workgroup_size=tiling.workgroup,
        grid=fold_grid(total, target),
        origins=[*node.origins, *group_origins(group.epilogue)],
        flops=batch * rows * columns * inner * 2,
        workgroup_nbytes=tiling.workgroup_nbytes(dtype.itemsize),
    )


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


def _store(
    builder: KernelBuilder, group: AnchorGroup, node: Contraction, tile_m: int, tile_n: int
) -> Store:
    rows, columns = product(node.rows), product(node.columns)
    members = anchor_members(group, node.output, node.index, builder)

    def environment(n: Expr) -> dict[Symbol, Expr]:
        return {
            **flat_values("b", node.batch, iteration("b", product(node.batch))),
            **flat_values("m", node.rows, iteration("m", rows)),
            **flat_values("n", node.columns, n),
        }

    lanes: Lanes = []
    if is_multiple_of(columns, VECTOR):
        quad = iteration("n", columns // VECTOR)
        lanes = [environment(quad * VECTOR + x) for x in range(VECTOR)]
        if not all(store_is_vector(builder, m, lanes) for m in members if m.store):
            lanes = []
    limit = columns // VECTOR if lanes else columns
    if not lanes:
        lanes = [environment(iteration("n", columns))]
    lines = render_epilogue(builder, members, node.output, lanes)
    guards = []
    if not is_multiple_of(rows, tile_m):
        guards.append(f"m < {builder.index(rows)}")
    if not is_multiple_of(columns, tile_n):
        guards.append(f"n < {builder.index(limit)}")
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
