"""Fusion: the nodes of a loop graph in groups, each of which is a kernel.

`fuse` walks the nodes in order and lets each one join a group that computes what it reads (or, for
a reduction, reads the same rows), when legality and the target's limits allow; else it opens a
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...ir.access import load_index
from ...ir.graph import AnchorGroup, KernelGroup, LoopGraph, MapGroup, Member, RowGroup, SingleGroup
from ...ir.nodes import HostCall, Pointwise, Reduction, inputs_of, outputs_of, reports
from ...ir.scalar import Load, Scalar, loads_of, substitute_symbols
from ...ir.spaces import Anchor, Node, numbered, symbol_keys
from ...symbolic.sizes import ONE, ZERO, Expr, Symbol, product, substitute
from ...target import Target
from ..looped import is_looped
from ..mapping import (
    extent_of,
    flat_mapping,
    invert_partially,
    map_into,
    point_of,
    reads_agree,
    stays_inside,
    tells_apart,
)

# Members of one kernel, at most. The values of more take registers, which an anchor's inner loop
# needs.
MAX_MEMBERS = 24


@dataclass
class Group:
    """A kernel group while it grows; `finish` makes the frozen `KernelGroup` of it.

    Attributes:
        kind: "map", "row", "anchor" or "single", as the classes of `KernelGroup`.
        rows, elements: the symbols of the iteration space. Only row groups have elements: the
            dimensions that are reduced.
        anchor: the node of an anchor or single group.
        members: pointwise nodes and reductions, with bodies over those symbols.
        computed: the index, in those symbols, at which each buffer is computed in the group.
        reads: buffers that the group loads and does not compute.
        needs: the groups, by number, that have to run before this one.
    """

    kind: str
    rows: tuple[Symbol, ...]
    elements: tuple[Symbol, ...] = ()
    anchor: Node | None = None
    members: list[Member] = field(default_factory=list)
    computed: dict[str, tuple[Expr, ...]] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)
    needs: set[int] = field(default_factory=set)

    @property
    def space(self) -> tuple[Symbol, ...]:
        """The symbols of the iteration space: rows, then elements."""
        return self.rows + self.elements

    def add(self, member: Member, reads: Sequence[str]) -> None:
        """Appends a member whose body and index are over the group's symbols.

        ``reads`` are the buffers that its node reads.
        """
        self.members.append(member)
        self.computed[member.output] = member.index
        self.reads |= {r for r in reads if r not in self.computed}


@dataclass(frozen=True)
class Grouping:
    """The nodes of a graph in groups that share a kernel each, in no order yet.

    ``Group.needs`` are positions in ``groups``.
    """

    graph: LoopGraph
    groups: tuple[Group, ...]


def depends(groups: Sequence[Group], group: int, on: int) -> bool:
    """Whether ``group`` is ``on``, or must run after it: directly, or through other groups."""
    stack, seen = [group], set()
    while stack:
        current = stack.pop()
        if current == on:
            return True
        if current not in seen:
            seen.add(current)
            stack.extend(groups[current].needs)
    return False


class Fuser:
    """Places the nodes of a graph in groups, one after another; the state of one `fuse` call.

    Attributes:
        groups: the groups so far.
        writer: the group, by number, that computes each buffer.
        reporting: groups that check indices, which need a binding for the device's status.
        readers: for each buffer, the (first) outputs of the nodes that read it.
        host_call: the group of the last host call.
    """

    def __init__(self, graph: LoopGraph, target: Target) -> None:
        self.graph = graph
        self.target = target
        self.groups: list[Group] = []
        self.writer: dict[str, int] = {}
        self.reporting: set[int] = set()  # groups that check indices
        self.readers: dict[str, set[str]] = {}
        self.host_call: int | None = None
        for node in graph.nodes:
            for name in inputs_of(node):
                self.readers.setdefault(name, set()).add(outputs_of(node)[0])

    def run(self, *, join: bool = True) -> list[Group]:
        """Places every node; the groups in order of creation, which may not be executable.

        Without ``join``, each node has a group of its own.
        """
        for node in self.graph.nodes:
            match node:
                case Pointwise() if join and self._join_pointwise(node):
                    pass
                case Reduction() if join and self._join_reduction(node):
                    pass
                case _:
                    self._open(node)
        return self.groups

    # -- bookkeeping -----------------------------------------------------------------------------

    def _producers(self, node: Node) -> list[int]:
        """Groups that write what a node reads, the largest buffer first."""
        found: dict[int, int] = {}
        for name in inputs_of(node):
            if name in self.writer:
                rank = len(self.graph.buffers[name].sizes)
                at = self.writer[name]
                found[at] = max(found.get(at, 0), rank)
        return sorted(found, key=lambda g: (-found[g], -g))

    def _may_join(self, node: Node, at: int) -> bool:
        """Whether a node may become a member of a group, apart from its indices.

        It may unless a group that the node needs depends on this one, a loop would be nested in a
        kernel that loops already, the node reads what an anchor's kernel writes at its end, or the
        kernel would have too many members or bindings.
        """
        group = self.groups[at]
        bodies = [node.body] if isinstance(node, Pointwise) else [m.body for m in group.members]
        loops = group.kind != "map" or not isinstance(node, Pointwise)
        if loops and any(is_looped(body, self.target) for body in bodies):
            return False
        others = {self.writer[n] for n in inputs_of(node) if n in self.writer} - {at}
        if any(depends(self.groups, other, at) for other in others):
            return False
        # The logsumexp of attention is there after its kernel only.
        apart = set() if group.anchor is None else set(outputs_of(group.anchor)[1:])
        if apart.intersection(inputs_of(node)):
            return False
        reads = (group.reads | set(inputs_of(node))) - set(group.computed)
        written = self._stored(group, extra=outputs_of(node)[0]) | apart
        checks = at in self.reporting or reports(node)
        bindings = self.graph.binding_count(reads | written, checks, self.target)
        return len(group.members) < MAX_MEMBERS and bindings <= self.target.max_storage_buffers

    def _stored(self, group: Group, extra: str) -> set[str]:
        """The buffers that the group would write if it computed ``extra`` too.

        That are those which a node outside of the group reads, or which the graph returns.
        """
        inside = {*group.computed, extra}
        return {
            name
            for name in inside
            if name in self.graph.returned or not self.readers.get(name, set()) <= inside
        }

    def _join(self, node: Node, at: int, member: Member) -> bool:
        group = self.groups[at]
        group.add(member, inputs_of(node))
        self._link(node, at)
        return True

    def _link(self, node: Node, at: int) -> None:
        needs = {self.writer[n] for n in inputs_of(node) if n in self.writer}
        self.groups[at].needs |= needs - {at}
        if isinstance(node, HostCall):
            # Collectives come in the same order in all processes, whatever is fused in which.
            self.groups[at].needs |= set() if self.host_call is None else {self.host_call}
            self.host_call = at
        for name in outputs_of(node):
            self.writer[name] = at
        if reports(node):
            self.reporting.add(at)

    # -- opening ---------------------------------------------------------------------------------

    def _open(self, node: Node) -> None:
        at = len(self.groups)
        match node:
            case Pointwise() | Reduction():
                rows = numbered("i", node.ranges)
                group, kind = Group("map", rows), None
                if isinstance(node, Reduction):
                    group, kind = Group("row", rows, numbered("r", node.reduce_ranges)), node.kind
                member = Member(node.output, node.body, point_of(rows), True, kind, node.origins)
                group.add(member, inputs_of(node))
            case Anchor():
                group = Group("anchor", symbol_keys(node.symbols), anchor=node)
                units = {s: ZERO for s in group.rows if s.extent is ONE}
                index = tuple(substitute(i, units) for i in node.result_index)
                group.computed[node.output] = index
            case _:
                group = Group("single", (), anchor=node)
        group.reads = set(inputs_of(node))
        self.groups.append(group)
        self._link(node, at)

    # -- joining ---------------------------------------------------------------------------------

    def _join_pointwise(self, node: Pointwise) -> bool:
        symbols = numbered("i", node.ranges)
        for at in self._producers(node):
            group = self.groups[at]
            if group.kind == "single" or not self._may_join(node, at):
                continue
            spaces = [(group.space, group.elements)]
            if group.kind == "row":
                spaces.append((group.rows, ()))
            read = _read_once(group)
            for space, elements in spaces:
                found = map_into(node.body, symbols, group.computed, space, elements, read)
                if found is not None:
                    mapping, body = found
                    index = tuple(mapping[s] for s in symbols)
                    member = Member(node.output, body, index, True, None, node.origins)
                    return self._join(node, at, member)
        return False

    def _join_reduction(self, node: Reduction) -> bool:
        reads = set(inputs_of(node))
        writers = {self.writer[name] for name in reads if name in self.writer}
        siblings = [
            g
            for g, group in enumerate(self.groups)
            if group.kind == "row" and (reads & group.reads or writers & group.needs)
        ]
        for at in dict.fromkeys([*self._producers(node), *reversed(siblings)]):
            group: Group | None = self.groups[at]
            if not self._may_join(node, at):
                continue
            if group is not None and group.kind == "map":
                group = _as_rows(group, node)
            if group is None or group.kind != "row":
                continue
            member = self._row_member(group, node)
            if member is not None:
                self.groups[at] = group
                return self._join(node, at, member)
        return False

    def _row_member(self, group: Group, node: Reduction) -> Member | None:
        rows = numbered("i", node.ranges)
        elements = numbered("r", node.reduce_ranges)
        outer = flat_mapping(rows, group.rows)
        inner = flat_mapping(elements, group.elements)
        if outer is None or inner is None:
            return None
        mapping = {**outer, **inner}
        body = substitute_symbols(node.body, mapping)
        if not reads_agree(body, group.computed):
            return None
        same = {
            self._source(load)
            for member in group.members
            for load in loads_of(member.body)
            if load.buffer not in group.computed
        }
        found = loads_of(body)
        if not any(self._source(o) in same or o.buffer in group.computed for o in found):
            return None  # the same numbers of rows, but not the same rows
        index = tuple(mapping[s] for s in rows)
        return Member(node.output, body, index, True, node.kind, node.origins)

    def _source(self, load: Load) -> tuple[int | str, tuple[Scalar, ...]]:
        """The source of a load: parts of a sum that one kernel writes at a place have one source.

        Other buffers are sources by themselves.
        """
        return self.writer.get(load.buffer, load.buffer), load.index


def _read_once(group: Group) -> dict[str, tuple[Expr, ...]]:
    """The index, in the group's symbols, of each input that a row group loads at distinct points.

    A member that reads such an input too should load it at the same points: it is then in a
    register, whatever order the elements are taken in.
    """
    if group.kind != "row":
        return {}
    return {
        load.buffer: index
        for member in group.members
        for load in loads_of(member.body)
        if load.buffer not in group.computed
        and (index := load_index(load)) is not None
        and tells_apart(index, group.space)
    }


def _as_rows(group: Group, node: Reduction) -> Group | None:
    """A map group as a row group over the rows that ``node`` reduces, or None."""
    rows = numbered("i", node.ranges)
    elements = numbered("r", node.reduce_ranges)
    load = next((o for o in loads_of(node.body) if o.buffer in group.computed), None)
    index = None if load is None else load_index(load)
    if load is None or index is None:
        return None
    computed = group.computed[load.buffer]
    if product(map(extent_of, group.rows)) is not product(map(extent_of, rows + elements)):
        return None
    # One point of the group for each that the reduction reads, and the other way round.
    there, back = invert_partially(computed, index), invert_partially(index, computed)
    if there is None or back is None or there.remainders or back.remainders:
        return None
    known = {*there.values, *back.values}
    if any(s not in known for s in (*group.rows, *rows, *elements) if extent_of(s) is not ONE):
        return None
    mapping = {s: there.values.get(s, ZERO) for s in group.rows}
    if not stays_inside(mapping):
        return None
    members = [_moved(m, mapping) for m in group.members]
    return replace(
        group,
        kind="row",
        rows=rows,
        elements=elements,
        members=members,
        computed={m.output: m.index for m in members},
    )


def _moved(member: Member, mapping: dict[Symbol, Expr]) -> Member:
    return replace(
        member,
        body=substitute_symbols(member.body, mapping),
        index=tuple(substitute(i, mapping) for i in member.index),
    )


def fuse(graph: LoopGraph, target: Target) -> Grouping:
    """The groups of a graph, as large as legality and the target's limits allow.

    The groups of all nodes together compute what the graph does; `finish` freezes them.
    """
    return Grouping(graph, tuple(Fuser(graph, target).run()))


def one_group_per_node(graph: LoopGraph, target: Target) -> Grouping:
    """The groups of a graph that is not fused: one per node."""
    return Grouping(graph, tuple(Fuser(graph, target).run(join=False)))


def finish(group: Group, stored: set[str]) -> KernelGroup:
    """The frozen form of a group.

    ``stored`` are the buffers that other groups read or the graph returns: only these are written.
    """
    members = tuple(replace(m, store=m.output in stored) for m in group.members)
    extents = tuple(extent_of(s) for s in group.rows)
    match group.kind:
        case "map":
            return MapGroup(extents, members)
        case "row":
            return RowGroup(extents, tuple(extent_of(s) for s in group.elements), members)
        case "anchor":
            assert isinstance(group.anchor, Anchor)
            keep = outputs_of(group.anchor)[0] in stored
            return AnchorGroup(group.anchor, members, keep)
        case _:
            assert group.anchor is not None
            return SingleGroup(group.anchor)
