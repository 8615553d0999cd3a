"""Map groups: every element independent, four neighbouring elements per invocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import dtypes
from ...ir.access import (
    VECTOR,
    Lanes,
    are_aligned_neighbours,
    flat_environment,
    is_multiple_of,
    lane_addresses,
    load_index,
)
from ...ir.buffers import Buffer
from ...ir.graph import MapGroup, Member
from ...ir.scalar import Load, Op, checks_of, walk
from ...ir.spaces import Origin, numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    Expr,
    Symbol,
    ceildiv,
    evaluate,
    iteration,
    linearize,
    product,
    substitute,
    symbols_of,
)
from ...target import Target
from ..values import Scope, Text, in_lanes
from .builder import KernelBody, KernelBuilder


def generate_map(group: MapGroup, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of a map group."""
    builder = KernelBuilder(target, buffers)
    return builder.finish_body(map_body(builder, group, target.workgroup_invocations))


def map_body(builder: KernelBuilder, group: MapGroup, workgroup: int) -> KernelBody:
    """The kernel body of a map group that is not empty."""
    buffers = builder.buffers
    symbols = numbered("i", group.ranges)
    numel = product(group.ranges)
    order = memory_order(group.members, symbols, buffers)
    packed, width = _choose_mode(group, buffers, symbols, order, numel)
    count = ceildiv(numel, width)
    if packed:
        lines = _packed_lines(builder, group, symbols, order, numel, width)
    else:
        q = iteration("q", count) * width
        lanes: Lanes = [flat_environment(symbols, q + k, order) for k in range(width)]
        lines = render_members(builder, group.members, lanes)
    return KernelBody(
        "pointwise",
        {"count": builder.index(count), "lines": lines},
        workgroup,
        ceildiv(count, workgroup),
        group_origins(group.members),
        group_flops(group),
    )


def group_origins(members: Sequence[Member]) -> list[Origin]:
    """Origins of all members, in order."""
    return [origin for member in members for origin in member.origins]


def group_flops(group: MapGroup) -> Expr:
    """Scalar operations of all members at all points."""
    nodes = (node for member in group.members for node in walk(member.body))
    count = sum(isinstance(node, Op) and node.name != "opaque" for node in nodes)
    return product(group.ranges) * count


def render_members(
    builder: KernelBuilder,
    members: Sequence[Member],
    lanes: Lanes,
    known: Mapping[str, Text] | None = None,
) -> list[str]:
    """Statements that compute all members at the given points and store those that are kept.

    ``known`` are values that the kernel has already, by buffer.
    """
    scope = Scope()
    values: dict[str, Text] = dict(known or {})

    def value_of(load: Load) -> Text | None:
        return values.get(load.buffer)

    renderer = builder.renderer(lanes, scope, member=value_of)
    for member in members:
        values[member.output] = renderer.render(member.body)
        if member.store:
            scope.lines += builder.store(member, values[member.output], lanes)
    return scope.lines


def _packed_lines(
    builder: KernelBuilder,
    group: MapGroup,
    symbols: Sequence[Symbol],
    order: Sequence[int],
    numel: Expr,
    width: int,
) -> list[str]:
    """Four unrelated elements per invocation, so that it owns whole words of packed outputs."""
    lanes: Lanes = []
    lines: list[str] = []
    for k in range(width):
        name = f"e{k}"
        lines.append(f"let {name} = min(q * {width} + {k}, {builder.index(numel - 1)});")
        lanes.append(flat_environment(symbols, iteration(name, numel), order))
    values: list[dict[str, Text]] = [{} for _ in lanes]
    for k, lane in enumerate(lanes):
        scope = Scope()
        known = values[k]
        renderer = builder.renderer([lane], scope, member=lambda load, v=known: v.get(load.buffer))
        for member in group.members:
            known[member.output] = renderer.render(member.body)
        lines += scope.lines
    for member in group.members:
        if member.store:
            dtype = builder.buffers[member.output].dtype
            codes = [v[member.output].code for v in values]
            if not builder.bindings.can_vectorize(dtype):
                # Four wide elements may pass the end by more than buffers are padded.
                function = builder.bindings.function(member.output, "store")
                lines += [f"{function}(e{k}, {code});" for k, code in enumerate(codes)]
                continue
            function = builder.bindings.function(member.output, "store4")
            lines.append(f"{function}(q, {in_lanes(dtype, codes)});")
    return lines


def memory_order(
    members: Sequence[Member], symbols: Sequence[Symbol], buffers: dict[str, Buffer]
) -> list[int]:
    """Positions of symbols from the slowest to the fastest in the first stored output's memory."""
    member = next(m for m in members if m.store)
    buffer = buffers[member.output]
    address = linearize(member.index, buffer.strides)
    steps = [_step(address, s) for s in symbols]
    return sorted(range(len(symbols)), key=lambda k: (-steps[k], k))


def _step(address: Expr, symbol: Symbol) -> int:
    """How far one step of a symbol moves an address; symbolic strides compare at size 97."""
    names = {s.name: 97 if s.extent is None else 0 for s in symbols_of(address)}
    start = evaluate(address, names)
    extent = symbol.extent
    if extent is None or (extent.is_constant and extent.constant == 1):
        return 0
    return abs(evaluate(address, {**names, symbol.name: 1}) - start)


def _choose_mode(
    group: MapGroup,
    buffers: dict[str, Buffer],
    symbols: Sequence[Symbol],
    order: Sequence[int],
    numel: Expr,
) -> tuple[bool, int]:
    """(whether an invocation packs what it has, elements of an invocation).

    Four neighbours need full groups of four, or accesses that stay inside padded buffers when the
    last group is partial. Outputs of less than 32 bits that cannot be vectorised are packed.
    """
    width = VECTOR
    lanes: Lanes = [
        flat_environment(symbols, iteration("q", ceildiv(numel, width)) * width + k, order)
        for k in range(width)
    ]
    whole = is_multiple_of(numel, width)
    accesses = [(m.output, m.index) for m in group.members if m.store]
    packed = any(buffers[name].dtype.packing > 1 for name, _ in accesses)
    if not packed and any(buffers[name].dtype is dtypes.float64 for name, _ in accesses):
        return False, 1  # four f64 are four loads and four times the code, which can be long
    stores_fit = all(
        are_aligned_neighbours(lane_addresses(buffers[n], i, lanes)) for n, i in accesses
    )
    if stores_fit and (whole or _stays_in_padding(group, buffers, lanes)):
        return False, width
    if packed and all(_is_flat(buffers[n], list(i), symbols, order) for n, i in accesses):
        return True, width
    return False, 1


def _is_flat(
    buffer: Buffer, index: list[Expr], symbols: Sequence[Symbol], order: Sequence[int]
) -> bool:
    flat = iteration("flat", buffer.numel)
    address = linearize(index, buffer.strides) + buffer.offset
    return substitute(address, flat_environment(symbols, flat, order)) is flat


def _stays_in_padding(
    group: MapGroup, buffers: dict[str, Buffer], lanes: Sequence[Mapping[Symbol, Expr]]
) -> bool:
    """Whether the lanes past the end only touch the padding to 16 bytes of each buffer.

    What follows an argument that is written in place may be another tensor, and an index past the
    end is not one to report.
    """
    computed = {m.output for m in group.members}
    for member in group.members:
        if member.store:
            buffer = buffers[member.output]
            if buffer.dtype.itemsize > 4 or buffer.shares is not None:
                return False
        if checks_of(member.body):
            return False
        for node in walk(member.body):
            if not isinstance(node, Load) or node.buffer in computed:
                continue
            exprs = load_index(node)
            if exprs is None:
                return False
            buffer = buffers[node.buffer]
            if buffer.dtype.itemsize > 4:
                return False
            address = linearize(exprs, buffer.strides)
            constant = all(substitute(address, env) is address for env in lanes)
            if not constant and not are_aligned_neighbours(lane_addresses(buffer, exprs, lanes)):
                return False
    return True
