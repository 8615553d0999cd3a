"""Checks of schedules: kernels read what was written, and nothing is overwritten too early.

`verify_schedule` raises `VerificationError`, naming the group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ..errors import VerificationError
from ..symbolic.sizes import linearize
from ..target import Target
from .access import load_index
from .anchors import access_pattern
from .buffers import BufferOrigin
from .canonical import canonical_form
from .graph import (
    AnchorGroup,
    ForeachGroup,
    GroupBuffers,
    JointGroup,
    KernelGroup,
    LoopGraph,
    MapGroup,
    PairGroup,
    Program,
    RowGroup,
    Schedule,
    SiblingGroup,
    SingleGroup,
    buffers_of,
)
from .nodes import Contraction, Scatter
from .renaming import twins_of
from .rows import choose_row_strategy, joint_nbytes
from .scalar import loads_of
from .transposition import find_transposition
from .verify import require, verify_output


def verify_schedule(schedule: Schedule, target: Target, verified: Schedule | None = None) -> None:
    """Raises VerificationError unless a schedule can be run on a GPU, each group by its kernel.

    Every buffer that a group reads must be an input, a constant, prepared, or stored by an earlier
    group, and is stored once; parts of one dispatch must not need each other, and fit in it;
    shared memory must not be read after it was overwritten; outputs must be written.

    Args:
        schedule, target: what to look at, and for what.
        verified: a schedule that can be run there. Groups that it has too, over the same buffers,
            are known to have a kernel.
    """
    graph = schedule.graph
    unchanged: set[int] = set()
    if verified is not None and verified.graph.buffers == graph.buffers:
        unchanged = {id(group) for group in verified.groups}
    written = set(graph.given)
    for number, group in enumerate(schedule.groups):
        title = f"group {number}"
        found = buffers_of(group)
        if id(group) not in unchanged:
            if isinstance(group, SiblingGroup | PairGroup):
                _repeat_lanes(title, group, graph)
            if isinstance(group, ForeachGroup):
                _equal_maps(title, group, graph, target)
            if isinstance(group, ForeachGroup | JointGroup):
                _independent(title, group)
            _within_limits(title, group, found, graph, target)
        for name in sorted(found.reads):
            known = name in written or graph.buffers[name].is_empty
            require(known, title, f"{name} stored by an earlier group")
        for name in found.stored:
            require(name in graph.buffers, title, f"a declaration of {name}")
            require(name not in written, title, f"{name} stored once only")
        written |= found.stored
    for position, output in enumerate(graph.outputs):
        verify_output(position, output, graph, written)
    _verify_in_place(schedule)


def _within_limits(
    title: str, group: KernelGroup, found: GroupBuffers, graph: LoopGraph, target: Target
) -> None:
    """A kernel of several nodes needs no more bindings and workgroup memory than there are.

    For a single node nothing was decided: code generation raises UnsupportedOp, and names it.
    """
    if not _is_one_node(group):
        count = graph.binding_count(found.reads | found.stored, found.reports, target)
        limit = target.max_storage_buffers
        require(count <= limit, title, f"at most {limit} bindings, not {count}")
    if isinstance(group, JointGroup):
        are_alike = not group.are_alike or twins_of(group.groups, graph.buffers) is not None
        require(are_alike, title, "parts that differ in the names of buffers only")
        rows = [part for part in group.groups if isinstance(part, RowGroup)]
        strategies = [choose_row_strategy(part, graph.buffers, target) for part in rows]
        nbytes, limit = joint_nbytes(strategies, target), target.max_workgroup_nbytes
        require(nbytes <= limit, title, f"{limit} bytes of workgroup memory at most, not {nbytes}")


def _is_one_node(group: KernelGroup) -> bool:
    match group:
        case SingleGroup():
            return True
        case MapGroup(members=members) | RowGroup(members=members):
            return len(members) == 1
        case AnchorGroup(epilogue=members):
            return not members
        case _:
            return False


def verify_prepared(program: Program[LoopGraph]) -> None:
    """Checks that exactly the buffers needed are prepared, from inputs that do not change."""
    graph, prepared = program.called, program.prepared
    given: frozenset[str] = frozenset()
    if prepared is not None:
        given = prepared.returned
        require(not prepared.prepared, "preparation", "no preparation of its own")
        static = {i.buffer for i in graph.inputs if i.static}
        for spec in prepared.inputs:
            require(spec.buffer in static, "preparation", f"{spec.buffer} a static input")
        for output in graph.outputs:
            if output.mutates is not None:
                changed = graph.inputs[output.mutates]
                require(
                    changed not in prepared.inputs,
                    "preparation",
                    f"{changed.buffer} unchanged by the graph",
                )
    require(given == graph.prepared, "preparation", f"the outputs {sorted(graph.prepared)}")


def _verify_in_place(schedule: Schedule) -> None:
    """A shared memory has one layout, and its old contents are read before it is written only."""
    graph = schedule.graph
    left = {name for name, buffer in graph.buffers.items() if buffer.shares is not None}
    if not left:
        return
    readers: dict[str, list[int]] = {}
    parts = [(k, part) for k, group in enumerate(schedule.groups) for part in _parts(group)]
    for number, part in parts:
        for name in buffers_of(part).loaded:
            readers.setdefault(name, []).append(number)
    for number, part in parts:
        if isinstance(part, MapGroup):
            left -= _verify_map_in_place(graph, part, number, readers)
        elif isinstance(part, SingleGroup) and isinstance(part.node, Scatter):
            if part.node.output in left:
                _verify_scatter_in_place(graph, part.node, number, readers)
                left.remove(part.node.output)
            elif isinstance(schedule.groups[number], JointGroup):
                raise VerificationError(f"group {number} needs {part.node.output} in place")
    require(not left, "schedule", f"scatters or maps that write {sorted(left)}")


def _parts(group: KernelGroup) -> Sequence[KernelGroup]:
    """The parts that a kernel computes side by side, each by workgroups of its own."""
    return group.groups if isinstance(group, ForeachGroup | JointGroup) else (group,)


def _verify_scatter_in_place(
    graph: LoopGraph, node: Scatter, number: int, readers: Mapping[str, Sequence[int]]
) -> None:
    """``readers``: the numbers of the groups that read a buffer, one for each of their parts."""
    own, root = graph.buffers[node.output], graph.buffers[graph.memory_of(node.output)]
    title = f"group {number} in place"
    require(own.shares == node.initial, title, "the memory of its initial buffer")
    same = root.strides == own.strides and root.offset is own.offset
    require(same, title, f"the layout of {root.name}")
    require(root.origin is not BufferOrigin.CONSTANT, title, "memory that may change")
    if root.origin is BufferOrigin.INPUT:
        require(_is_assigned(root.name, graph), title, f"a result assigned to {root.name}")
    others = [k for k in readers.get(node.initial, ()) if k >= number]
    unread = len(others) <= 1 and node.initial not in graph.returned
    require(unread and node.reads_own_elements, title, f"no other reader of {node.initial} then")


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
        require(member.store, title, f"{name} stored")
        require(old.origin is BufferOrigin.INPUT, title, f"an input for {name}")
        require(own.span is old.span, title, f"the elements of {old.name}")
        require(_is_assigned(old.name, graph), title, f"a result assigned to {old.name}")
        place = linearize(member.index, own.strides) + own.offset
        loads = [o for m in group.members for o in loads_of(m.body) if o.buffer == old.name]
        for load in loads:
            index = load_index(load)
            here = index is not None and linearize(index, old.strides) + old.offset is place
            require(here, title, f"{old.name} read where it is written")
        others = [k for k in readers.get(old.name, ()) if k >= number]
        require(len(others) <= bool(loads), title, f"no other reader of {old.name} then")
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


def _repeat_lanes(title: str, group: SiblingGroup | PairGroup, graph: LoopGraph) -> None:
    anchors = [part.anchor for part in group.groups if isinstance(part.anchor, Contraction)]
    require(len(anchors) == len(group.groups), title, "contractions")
    first = anchors[0]
    patterns: list[Hashable] = []
    if isinstance(group, SiblingGroup):
        patterns = [access_pattern(part, graph.buffers) for part in group.groups]
    for k, (sibling, anchor) in enumerate(zip(group.groups, anchors, strict=True)):
        require(anchor.lhs.dtype is first.lhs.dtype, title, "one dtype")
        equal = anchor.batch == first.batch and anchor.inner == first.inner
        require(equal, title, "equal batch and inner sizes")
        if isinstance(group, PairGroup):
            require(anchor.lhs is first.lhs, title, "one lhs")
            equal = anchor.rows == first.rows and anchor.columns == first.columns
            require(equal, title, "equal sizes")
        else:
            alike = patterns[k] == patterns[0]
            require(alike, title, "operands and results that are accessed alike")
        for j, other in enumerate(group.groups):
            if j > k or (j < k and isinstance(group, SiblingGroup)):
                read = buffers_of(sibling).loaded & buffers_of(other).computed
                require(not read, title, f"products that do not need each other's {sorted(read)}")


def _equal_maps(title: str, group: ForeachGroup, graph: LoopGraph, target: Target) -> None:
    forms = [canonical_form(part, graph.buffers) for part in group.groups]
    require(None not in forms, title, "maps that have a canonical form")
    same = len({form.key for form in forms if form is not None}) == 1
    require(same, title, "maps that compute the same")
    tiled = any(find_transposition(part, graph.buffers, target) for part in group.groups)
    require(not tiled, title, "maps that do not go through tiles")


def _independent(title: str, group: ForeachGroup | JointGroup) -> None:
    found = list(map(buffers_of, group.groups))
    computed = frozenset().union(*(part.computed for part in found))
    for part in found:
        read = part.loaded & (computed - part.computed)
        require(not read, title, f"parts that do not need each other's {sorted(read)}")
