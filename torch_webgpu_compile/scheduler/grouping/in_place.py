"""Scatters that write where their initial contents are, and maps that write over arguments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ...ir.access import VECTOR, is_multiple_of, load_index
from ...ir.buffers import Buffer, BufferOrigin
from ...ir.graph import LoopGraph, Member
from ...ir.nodes import Scatter
from ...ir.scalar import loads_of
from ...symbolic.sizes import ZERO, linearize
from .fusion import Group, Grouping, depends


def write_in_place(grouping: Grouping, single: bool = False) -> Grouping:
    """Finds the scatters that need no copy, and orders the readers of what they overwrite.

    The initial contents may be overwritten when nothing reads them after the scatter: for an
    intermediate, when no group that depends on the scatter reads it; for an input, when in addition
    the graph gives that input exactly the result (of the last scatter of a chain). Groups that read
    the initial contents get to run before the scatter.

    A map may write over an input that takes its result, element by element, when it reads that
    input nowhere but where it writes: an optimizer's step binds a parameter once instead of twice,
    and finds it where it was. Of a graph that changes one input only, memory of its own may take
    the place of the input's, whatever else has that memory.

    Args:
        single: whether a map also writes over the only input that changes.

    Returns:
        The same groups, in which those readers come first, over a graph in which the results share
        the memory of the initial contents and their layout.
    """
    graph = grouping.graph
    copied: set[str] = set()
    while True:
        sharing = _Sharing(grouping, copied)
        groups = sharing.groups
        for at, group in enumerate(groups):
            if isinstance(group.anchor, Scatter):
                sharing.visit(group.anchor, at)
        # An input may be overwritten before such a scatter only if that is in place, too.
        found = sharing.copied_in_chains()
        if not found:
            break
        copied |= found
    if single or sum(output.mutates is not None for output in graph.outputs) > 1:
        for at, group in enumerate(groups):
            if group.kind == "map":
                sharing.visit_map(group, at)
    return Grouping(graph.with_nodes(graph.nodes, sharing.buffers), tuple(groups))


class _Sharing:
    """The state of one `write_in_place` call.

    Args:
        copied: results of scatters that are known not to be in place.
    """

    def __init__(self, grouping: Grouping, copied: Collection[str]) -> None:
        self.graph = graph = grouping.graph
        self.groups = [replace(group, needs=set(group.needs)) for group in grouping.groups]
        self.buffers: dict[str, Buffer] = dict(graph.buffers)
        self.roots: dict[str, str] = {}
        self.assigned = _assigned_inputs(graph, self.groups, copied)
        self.results = {o.buffer: o for o in graph.outputs if o.mutates is not None}
        self.readers: dict[str, list[int]] = {}
        for k, group in enumerate(self.groups):
            for name in group.reads:
                self.readers.setdefault(name, []).append(k)

    def visit(self, node: Scatter, at: int) -> None:
        """Lets a scatter's output share the memory of its initial contents, if that is legal."""
        root = self.roots.get(node.initial, node.initial)
        if not self._is_legal(node, root):
            return
        readers = [k for k in self.readers.get(node.initial, ()) if k != at]
        if any(depends(self.groups, reader, at) for reader in readers):
            return
        self.groups[at].needs |= set(readers)
        self.roots[node.output] = root
        layout = self.buffers[root]
        self.buffers[node.output] = replace(
            self.buffers[node.output],
            strides=layout.strides,
            offset=layout.offset,
            shares=node.initial,
        )

    def copied_in_chains(self) -> set[str]:
        """Results of scatters that are not in place, although one before them relies on it."""
        nodes = [group.anchor for group in self.groups if isinstance(group.anchor, Scatter)]
        return {
            node.output
            for node in nodes
            if node.output not in self.roots and node.initial in self.assigned
        }

    def visit_map(self, group: Group, at: int) -> None:
        """Lets members of a map group be written to the memory of the inputs that they update.

        The group then runs after all other readers of these inputs.
        """
        for member in group.members:
            old = self._replaced(member)
            if old is None or not _reads_own_element(group, member, old, self.buffers):
                continue
            readers = [k for k in self.readers.get(old.name, ()) if k != at]
            if not any(depends(self.groups, reader, at) for reader in readers):
                self.groups[at].needs |= set(readers)
                own = self.buffers[member.output]
                self.buffers[member.output] = replace(own, shares=old.name, offset=old.offset)

    def _replaced(self, member: Member) -> Buffer | None:
        """The input whose elements, each in its place, are those of a member's buffer."""
        result = self.results.get(member.output)
        name = self.assigned.get(member.output)
        if result is None or name is None:
            return None
        own, old = self.buffers[member.output], self.buffers[name]
        reach = own.span + old.offset  # of what is in place
        alike = own.dtype is old.dtype and reach is old.span and own.numel is old.numel
        if not alike or {own.offset, result.offset} != {ZERO} or result.strides != old.strides:
            return None
        # What lies beside it in the first and last words, or vectors, may be another tensor's.
        words = own.dtype.packing == 1 or (
            is_multiple_of(own.numel, VECTOR) and is_multiple_of(old.offset, VECTOR)
        )
        return old if words else None

    def _is_legal(self, node: Scatter, root: str) -> bool:
        """Whether the root's memory may hold the result, but for the readers of its contents."""
        if not node.reads_own_elements or node.initial in self.graph.returned:
            return False
        match self.buffers[root].origin:
            case BufferOrigin.INPUT:
                # An eager operator's argument may start inside of a binding: it is rare.
                at_start = self.buffers[root].offset is ZERO
                return at_start and self.assigned.get(node.output) == root
            case BufferOrigin.INTERMEDIATE:
                old, new = self.buffers[root], self.buffers[node.output]
                return old.strides == new.strides and old.offset is new.offset
            case _:
                return False


def _assigned_inputs(
    graph: LoopGraph, groups: list[Group], copied: Collection[str]
) -> dict[str, str]:
    """The input that a scatter's result is assigned to, or that of scatters in place after it.

    Args:
        copied: results of scatters that are not in place.
    """
    shown = [output.buffer for output in graph.outputs]
    found: dict[str, str] = {}
    for output in graph.outputs:
        if output.mutates is not None and output.buffer and shown.count(output.buffer) == 1:
            name = graph.inputs[output.mutates].buffer
            if name is not None:
                found[output.buffer] = name
    for group in reversed(groups):
        node = group.anchor
        if isinstance(node, Scatter) and node.output in found and node.output not in copied:
            found.setdefault(node.initial, found[node.output])
    return found


def _reads_own_element(
    group: Group, member: Member, old: Buffer, buffers: dict[str, Buffer]
) -> bool:
    """Whether each point reads of ``old`` only the element that it writes as ``member``."""
    own = buffers[member.output]
    place = linearize(member.index, own.strides) + old.offset
    for load in (load for other in group.members for load in loads_of(other.body)):
        if load.buffer == old.name:
            index = load_index(load)
            if index is None or linearize(index, old.strides) + old.offset is not place:
                return False
    return True
