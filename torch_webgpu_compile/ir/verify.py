"""Checks of the IR between passes. A failure is a bug of the pass before.

`verify_loop_graph` and `verify_schedule` raise `VerificationError`, naming the node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .. import dtypes
from ..dtypes import Kind
from ..errors import VerificationError
from ..sizes import Expr, Symbol, as_expr, linearize, symbols_of
from .canonical import canonical_form
from .graph import (
    Buffer,
    BufferOrigin,
    ForeachGroup,
    GraphOutput,
    JointGroup,
    KernelGroup,
    LoopGraph,
    MapGroup,
    PairGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
    buffers_of,
)
from .nodes import (
    REDUCTIONS,
    Attention,
    AttentionGradient,
    Contraction,
    HostCall,
    Node,
    Pointwise,
    Reduction,
    Scatter,
    bodies_of,
    inputs_of,
    iteration_symbols,
    named_bodies,
    outputs_of,
    symbol_keys,
)
from .scalar import OPS, Index, Load, Masked, Op, Scalar, loads_of, scalar_symbols, walk


def verify_loop_graph(graph: LoopGraph) -> None:
    """Raises VerificationError unless every rule of the loop IR holds."""
    for buffer in graph.buffers.values():
        _require(len(buffer.sizes) == len(buffer.strides), buffer.name, "as many strides as sizes")
    written = {i.buffer for i in graph.inputs if i.buffer is not None} | set(graph.constants)
    for name in written:
        _require(name in graph.buffers, name, "a declared buffer")
    sizes = _size_symbols(graph)
    for node in graph.nodes:
        for name in inputs_of(node):
            _require(name in graph.buffers, _title(node), f"a declaration of {name}")
            _require(
                name in written or _is_empty(graph.buffers[name]),
                _title(node),
                f"{name} written before it is read",
            )
        for name in outputs_of(node):
            _require(name in graph.buffers, _title(node), f"a declaration of {name}")
            _require(name not in written, _title(node), f"{name} written once only")
            origin = graph.buffers[name].origin
            _require(origin is BufferOrigin.INTERMEDIATE, _title(node), f"{name} an intermediate")
            written.add(name)
        verify_node(node, graph, sizes)
    for position, output in enumerate(graph.outputs):
        _verify_output(position, output, graph, written)


def verify_node(node: Node, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    """One node's ranges, bodies and output against the declared buffers and size symbols."""
    title = _title(node)
    match node:
        case Pointwise():
            _body(title, node.body, [("i", node.ranges)], graph, sizes)
            _shape(title, graph.buffers[node.output], node.ranges)
            _same_dtype(title, node.body, graph.buffers[node.output])
        case Reduction():
            groups = [("i", node.ranges), ("r", node.reduce_ranges)]
            _body(title, node.body, groups, graph, sizes)
            _shape(title, graph.buffers[node.output], node.ranges)
            _reduction(title, node, graph.buffers[node.output])
        case Contraction():
            _contraction(title, node, graph, sizes)
        case Attention() | AttentionGradient():
            _attention(title, node, graph, sizes)
        case Scatter():
            output, initial = graph.buffers[node.output], graph.buffers[node.initial]
            _require(output.sizes == initial.sizes, title, "the sizes of its initial buffer")
            _require(output.dtype is initial.dtype, title, "the dtype of its initial buffer")
            _require(len(node.index) == len(output.sizes), title, "an index per dimension")
            for entry in node.index:
                _body(title, entry, [("i", node.ranges)], graph, sizes)
                _require(entry.dtype is dtypes.int64, title, "int64 indices")
            _body(title, node.body, [("i", node.ranges)], graph, sizes)
            _same_dtype(title, node.body, output)
        case HostCall():
            _require(node.target.count(".") == 2, title, "a target namespace.name.overload")


def _reduction(title: str, node: Reduction, buffer: Buffer) -> None:
    _require(node.kind in REDUCTIONS, title, f"one of the reductions {REDUCTIONS}")
    wanted = dtypes.int64 if node.kind in ("argmin", "argmax") else node.body.dtype
    _require(buffer.dtype is wanted, title, f"an output of {wanted}, not {buffer.dtype}")
    is_test = node.kind in ("any", "all")
    _require(is_test == (node.body.dtype.kind is Kind.BOOL), title, "bool for any and all alone")


def _contraction(title: str, node: Contraction, graph: LoopGraph, sizes: frozenset[Symbol]) -> None:
    batch, rows = ("b", node.batch), ("m", node.rows)
    columns, inner = ("n", node.columns), ("k", node.inner)
    _body(title, node.lhs, [batch, rows, inner], graph, sizes)
    _body(title, node.rhs, [batch, columns, inner], graph, sizes)
    dtype = node.lhs.dtype
    same = dtype is node.rhs.dtype and dtype in (dtypes.float32, dtypes.float64)
    _require(same, title, "float32 or float64 operands")
    buffer = graph.buffers[node.output]
    _require(len(node.index) == len(buffer.sizes), title, "an index per dimension")
    allowed = _symbols([batch, rows, columns]) | sizes
    used: set[Symbol] = set()
    for entry in node.index:
        _known(title, symbols_of(entry), allowed)
        used |= symbols_of(entry)
    for symbol in _symbols([batch, rows, columns]):
        extent = symbol.extent
        one = extent is not None and extent.is_constant and extent.constant == 1
        _require(one or symbol in used, title, f"{symbol} in its output index")


def _attention(
    title: str, node: Attention | AttentionGradient, graph: LoopGraph, sizes: frozenset[Symbol]
) -> None:
    spaces = node.spaces
    for name, body in named_bodies(node).items():
        _body(title, body, spaces[name], graph, sizes)
        _require(body.dtype is dtypes.float32, title, f"a float32 {name}")
    output = graph.buffers[node.output]
    if isinstance(node, AttentionGradient):
        _require(node.of in ("queries", "keys"), title, "queries or keys")
        _shape(title, output, node.output_sizes)
        return
    batch, heads, queries, *_ = node.sizes
    if node.parts > 1:
        _shape(title, output, (as_expr(node.parts), batch, heads, queries, node.wide + 4))
        alone = node.kept is None and node.logsumexp is None
        _require(alone, title, "no dropout and no logsumexp with parts")
    if node.logsumexp is not None:
        statistic = graph.buffers[node.logsumexp]
        _shape(title, statistic, (batch, heads, queries))
        _require(statistic.dtype is dtypes.float32, title, "a float32 logsumexp")


def _verify_output(
    position: int, output: GraphOutput, graph: LoopGraph, written: Iterable[str | None]
) -> None:
    title = f"output {position}"
    if output.buffer is None:
        return
    _require(output.buffer in graph.buffers, title, f"a declaration of {output.buffer}")
    buffer = graph.buffers[output.buffer]
    known = output.buffer in set(written) or _is_empty(buffer)
    _require(known, title, f"a node that writes {output.buffer}")
    _require(len(output.sizes) == len(output.strides), title, "as many strides as sizes")
    _require(output.offset is not None, title, "an offset")


def verify_schedule(schedule: Schedule) -> None:
    """Every buffer that a group reads is given, or stored by an earlier group."""
    graph = schedule.graph
    written = {i.buffer for i in graph.inputs if i.buffer is not None} | set(graph.constants)
    written |= _verify_preparation(schedule)
    for number, group in enumerate(schedule.groups):
        title = f"group {number}"
        if isinstance(group, SiblingGroup | PairGroup):
            _side_by_side(title, group)
        if isinstance(group, ForeachGroup):
            _equal_maps(title, group, graph)
        if isinstance(group, ForeachGroup | JointGroup):
            _independent(title, group)
        found = buffers_of(group)
        for name in sorted(found.reads):
            known = name in written or _is_empty(graph.buffers[name])
            _require(known, title, f"{name} stored by an earlier group")
        for name in found.stored:
            _require(name in graph.buffers, title, f"a declaration of {name}")
            _require(name not in written, title, f"{name} stored once only")
        written |= found.stored
    for position, output in enumerate(graph.outputs):
        _verify_output(position, output, graph, written)
    _verify_in_place(schedule)


def _verify_preparation(schedule: Schedule) -> set[str]:
    """The buffers that are prepared: exactly those that need to be, from what does not change."""
    graph, preparation = schedule.graph, schedule.preparation
    prepared = {n for n, b in graph.buffers.items() if b.origin is BufferOrigin.PREPARED}
    given: frozenset[str] = frozenset()
    if preparation is not None:
        verify_schedule(preparation)
        given = preparation.graph.returned
        static = {i.buffer for i in graph.inputs if i.static}
        for spec in preparation.graph.inputs:
            _require(spec.buffer in static, "preparation", f"{spec.buffer} a static input")
        for output in graph.outputs:
            if output.mutates is not None:
                changed = graph.inputs[output.mutates]
                _require(
                    changed not in preparation.graph.inputs,
                    "preparation",
                    f"{changed.buffer} unchanged by the graph",
                )
    _require(given == prepared, "preparation", f"the outputs {sorted(prepared)}")
    return prepared


def _verify_in_place(schedule: Schedule) -> None:
    """A shared memory has one layout, and its old contents are read before it is written only."""
    graph = schedule.graph
    left = {name for name, buffer in graph.buffers.items() if buffer.shares is not None}
    if not left:
        return
    readers: dict[str, list[int]] = {}
    for number, group in enumerate(schedule.groups):
        for part in _parts(group):
            for name in buffers_of(part).loaded:
                readers.setdefault(name, []).append(number)
    for number, group in enumerate(schedule.groups):
        for part in _parts(group):
            if isinstance(part, MapGroup):
                left -= _verify_map_in_place(graph, part, number, readers)
            elif isinstance(part, SingleGroup) and isinstance(part.node, Scatter):
                if part.node.output in left:
                    _verify_scatter_in_place(graph, part.node, number, readers)
                    left.remove(part.node.output)
                elif isinstance(group, JointGroup):
                    raise VerificationError(f"group {number} needs {part.node.output} in place")
    _require(not left, "schedule", f"scatters or maps that write {sorted(left)}")


def _parts(group: KernelGroup) -> Sequence[KernelGroup]:
    """What a kernel computes side by side, each part by workgroups of its own."""
    return group.groups if isinstance(group, ForeachGroup | JointGroup) else (group,)


def _verify_scatter_in_place(
    graph: LoopGraph, node: Scatter, number: int, readers: Mapping[str, Sequence[int]]
) -> None:
    """``readers``: the numbers of the groups that read a buffer, one for each of their parts."""
    own, root = graph.buffers[node.output], graph.buffers[graph.memory_of(node.output)]
    title = f"group {number} in place"
    _require(own.shares == node.initial, title, "the memory of its initial buffer")
    same = root.strides == own.strides and root.offset is own.offset
    _require(same, title, f"the layout of {root.name}")
    _require(root.origin is not BufferOrigin.CONSTANT, title, "memory that may change")
    if root.origin is BufferOrigin.INPUT:
        _require(_is_assigned(root.name, graph), title, f"a result assigned to {root.name}")
    own_loads = {load.buffer for body in bodies_of(node) for load in loads_of(body)}
    others = [k for k in readers.get(node.initial, ()) if k >= number]
    unread = len(others) <= 1 and node.initial not in own_loads | graph.returned
    _require(unread, title, f"no other reader of {node.initial} then")


def _verify_map_in_place(
    graph: LoopGraph, group: MapGroup, number: int, readers: Mapping[str, Sequence[int]]
) -> set[str]:
    """The buffers that a map writes over an input, of which every point reads its own element.

    ``readers``: the numbers of the groups that read a buffer, one for each map of a group of maps.
    """
    shared = {m.output: m for m in group.members if graph.buffers[m.output].shares is not None}
    title = f"group {number} in place"
    for name, member in shared.items():
        own, old = graph.buffers[name], graph.buffers[graph.memory_of(name)]
        _require(member.store, title, f"{name} stored")
        _require(old.origin is BufferOrigin.INPUT, title, f"an input for {name}")
        _require(own.span is old.span, title, f"the elements of {old.name}")
        _require(_is_assigned(old.name, graph), title, f"a result assigned to {old.name}")
        place = linearize(member.index, own.strides) + own.offset
        loads = [o for m in group.members for o in loads_of(m.body) if o.buffer == old.name]
        for load in loads:
            index = [entry.expr for entry in load.index if isinstance(entry, Index)]
            here = len(index) == len(load.index)
            here = here and linearize(index, old.strides) + old.offset is place
            _require(here, title, f"{old.name} read where it is written")
        others = [k for k in readers.get(old.name, ()) if k >= number]
        _require(len(others) <= bool(loads), title, f"no other reader of {old.name} then")
    return set(shared)


def _is_assigned(name: str, graph: LoopGraph) -> bool:
    """Whether an input takes what is in its own memory after the last node."""
    return any(
        output.mutates is not None
        and output.buffer is not None
        and graph.inputs[output.mutates].buffer == name
        and graph.memory_of(output.buffer) == name
        for output in graph.outputs
    )


def _side_by_side(title: str, group: SiblingGroup | PairGroup) -> None:
    first = group.groups[0].anchor
    for k, sibling in enumerate(group.groups):
        anchor = sibling.anchor
        same = isinstance(anchor, Contraction) and isinstance(first, Contraction)
        _require(same, title, "contractions")
        assert isinstance(anchor, Contraction)
        assert isinstance(first, Contraction)
        _require(anchor.lhs.dtype is first.lhs.dtype, title, "one dtype")
        equal = anchor.batch == first.batch and anchor.inner == first.inner
        _require(equal, title, "equal batch and inner sizes")
        if isinstance(group, PairGroup):
            _require(anchor.lhs is first.lhs, title, "one lhs")
            equal = anchor.rows == first.rows and anchor.columns == first.columns
            _require(equal, title, "equal sizes")
        for j, other in enumerate(group.groups):
            if j > k or (j < k and isinstance(group, SiblingGroup)):
                read = buffers_of(sibling).loaded & buffers_of(other).computed
                _require(not read, title, f"products that do not need each other's {sorted(read)}")


def _equal_maps(title: str, group: ForeachGroup, graph: LoopGraph) -> None:
    forms = [canonical_form(part, graph.buffers) for part in group.groups]
    _require(None not in forms, title, "maps that have a canonical form")
    same = len({form.key for form in forms if form is not None}) == 1
    _require(same, title, "maps that compute the same")


def _independent(title: str, group: ForeachGroup | JointGroup) -> None:
    found = list(map(buffers_of, group.groups))
    computed = frozenset().union(*(part.computed for part in found))
    for part in found:
        read = part.loaded & (computed - part.computed)
        _require(not read, title, f"parts that do not need each other's {sorted(read)}")


def _body(
    title: str,
    body: Scalar,
    groups: Sequence[tuple[str, Sequence[Expr]]],
    graph: LoopGraph,
    sizes: frozenset[Symbol],
) -> None:
    _known(title, scalar_symbols(body), _symbols(groups) | sizes)
    for node in walk(body):
        match node:
            case Load(name, index, dtype):
                _require(name in graph.buffers, title, f"a declaration of {name}")
                buffer = graph.buffers[name]
                _require(len(index) == len(buffer.sizes), title, f"{buffer.sizes} to index {name}")
                _require(dtype is buffer.dtype, title, f"{name} loaded as {buffer.dtype}")
                for entry in index:
                    _require(entry.dtype is dtypes.int64, title, f"int64 indices into {name}")
            case Masked(condition, inner, other):
                _require(condition.dtype is dtypes.bool_, title, "a bool condition in masked")
                _require(inner.dtype is other.dtype, title, "one dtype in masked")
            case Op(name, args, _):
                _require(name in OPS, title, f"a known scalar op instead of {name}")
                _require(len(args) == OPS[name].arity, title, f"{OPS[name].arity} args of {name}")


def _known(title: str, used: Iterable[Symbol], allowed: Iterable[Symbol]) -> None:
    unknown = sorted(s.name for s in set(used) - set(allowed))
    _require(not unknown, title, f"symbols of its ranges, not {unknown}")


def _symbols(groups: Sequence[tuple[str, Sequence[Expr]]]) -> frozenset[Symbol]:
    return frozenset(
        key for prefix, ranges in groups for key in symbol_keys(iteration_symbols(prefix, ranges))
    )


def _size_symbols(graph: LoopGraph) -> frozenset[Symbol]:
    """Size symbols that inputs bind."""
    found: frozenset[Symbol] = frozenset()
    for spec in graph.inputs:
        if spec.size is not None:
            found |= symbols_of(spec.size)
        if spec.buffer is not None:
            for size in graph.buffers[spec.buffer].sizes:
                found |= symbols_of(size)
    return found


def _shape(title: str, buffer: Buffer, ranges: Sequence[Expr]) -> None:
    _require(buffer.sizes == tuple(ranges), title, f"ranges {buffer.sizes} of its output")


def _same_dtype(title: str, body: Scalar, buffer: Buffer) -> None:
    _require(body.dtype is buffer.dtype, title, f"a body of {buffer.dtype}, not {body.dtype}")


def _is_empty(buffer: Buffer) -> bool:
    return any(size.is_constant and size.constant == 0 for size in buffer.sizes)


def _title(node: Node) -> str:
    ops = ", ".join(origin.op for origin in node.origins)
    return f"{type(node).__name__} {', '.join(outputs_of(node))} ({ops})"


def _require(condition: bool, title: str, wanted: str) -> None:
    if not condition:
        raise VerificationError(f"{title} needs {wanted}")
