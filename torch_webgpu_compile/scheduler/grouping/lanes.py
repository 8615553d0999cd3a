"""Repeats the schedule of one entry of a call's lists for many entries, the lanes.

An operator on lists does the same to every entry. So one entry is enough for all that decides what
becomes a kernel; what follows here has no decisions but how many entries share a dispatch. Sizes
that are symbols stay symbols, one for each lane: the kernel is the same whatever they are, and the
lists of all parameters of a model need it once.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir.at_sizes import substituted, symbols_of_parts, with_extents
from ...ir.buffers import Buffer
from ...ir.canonical import canonical_form
from ...ir.graph import (
    ForeachGroup,
    GraphInput,
    GraphOutput,
    JointGroup,
    KernelGroup,
    LoopGraph,
    MapGroup,
    Member,
    RowGroup,
    Schedule,
    buffers_of,
    map_group,
)
from ...ir.lanes import Lanes
from ...ir.renaming import rename_group, twins_of
from ...ir.scalar import Index, Load, Scalar, rewrite
from ...symbolic.sizes import Expr, Symbol, as_expr, symbol
from ...target import Target
from .joint import is_small

# The kernel has two cases for each, which drivers compile in more than linear time: with llvmpipe,
# an operator on 148 tensors takes 0.12 s at first with 16 of them, 0.32 s with 32.
_MOST = 16
# Other groups have all of their code in a kernel that they share.
_MOST_OTHERS = 4


def repeat_lanes(schedule: Schedule, lanes: Lanes, target: Target) -> Schedule:
    """The schedule of as many lanes as a dispatch has room for, at most ``lanes.count``.

    Inputs are the lanes' own, lane after lane, then what they share; results are lane after lane.
    Numbers of the lanes' own follow, in one tensor, those that they share.
    """
    graph = schedule.graph
    shared = {entry.buffer for entry in graph.inputs[lanes.own :]} | set(graph.constants)
    count = min(lanes.count, _fitting(schedule, shared, target))
    numbers = graph.inputs[-1].buffer if lanes.numbers else None
    copies = [_Lane(schedule, lanes, k, shared, numbers) for k in range(count)]
    buffers = {name: b for name, b in graph.buffers.items() if name in shared}
    if numbers is not None:
        buffers[numbers] = _of_all(graph.buffers[numbers], lanes, count)
    inputs: list[GraphInput] = []
    outputs: list[GraphOutput] = []
    for copy in copies:
        buffers |= copy.buffers()
        inputs += copy.inputs()
        outputs += copy.outputs()
    made = LoopGraph(
        graph.name,
        buffers,
        (),
        (*inputs, *graph.inputs[lanes.own :]),
        tuple(outputs),
        graph.constants,
    )
    groups: list[KernelGroup] = []
    for group in schedule.groups:
        parts = [copy.group(group) for copy in copies]
        maps = [part for part in parts if isinstance(part, MapGroup)]
        if len(maps) > 1 and canonical_form(maps[0], buffers) is not None:
            groups.append(ForeachGroup(tuple(maps)))
        elif count > 1 and _shares_code(group, schedule, target):
            rows = tuple(part for part in parts if isinstance(part, RowGroup))
            groups.append(JointGroup(rows, twins_of(rows, buffers) is not None))
        else:
            groups += parts
    return Schedule(made, tuple(groups))


def _fitting(schedule: Schedule, shared: set[str | None], target: Target) -> int:
    """How many lanes the bindings of a kernel allow."""
    found = _MOST
    for group in schedule.groups:
        if not isinstance(group, MapGroup) and not _shares_code(group, schedule, target):
            found = min(found, _MOST_OTHERS)
        else:
            bound = buffers_of(group)
            names = bound.reads | bound.stored
            whole = schedule.graph.binding_count(names, bound.reports, target)
            common = schedule.graph.binding_count(names & shared, bound.reports, target)
            room = target.max_storage_buffers - common
            found = min(found, room // max(1, whole - common))
    return max(1, found)


def _shares_code(group: KernelGroup, schedule: Schedule, target: Target) -> bool:
    """Whether copies of a group, which is no map, have their code in a kernel once."""
    return isinstance(group, RowGroup) and is_small(group, schedule, target)


def _of_all(numbers: Buffer, lanes: Lanes, count: int) -> Buffer:
    """The tensor with the numbers of all lanes; it may be a part of a larger one."""
    own = int(numbers.numel) - lanes.shared_numbers
    size = as_expr(lanes.shared_numbers + own * count)
    return replace(numbers, sizes=(size,), offset=symbol("first_number"))


class _Lane:
    """One copy of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        lanes: Lanes,
        number: int,
        shared: set[str | None],
        numbers: str | None,
    ) -> None:
        self._graph = graph = schedule.graph
        self._lanes = lanes
        self._number = number
        self._numbers = numbers
        self._names = {n: n if n in shared else f"{n}.{number}" for n in graph.buffers}
        self._values = self._symbols(schedule)

    def _symbols(self, schedule: Schedule) -> dict[Symbol, Expr]:
        """Symbols of this lane for those of the one."""
        sizes = symbols_of_parts(schedule.graph.buffers.values())
        values = {s: symbol(f"{s.name}_{self._number}", s.lower, s.most, s.usual) for s in sizes}
        maps = [group for group in schedule.groups if isinstance(group, MapGroup)]
        return with_extents(values, symbols_of_parts(m for group in maps for m in group.members))

    def buffers(self) -> dict[str, Buffer]:
        """The buffers that are not shared."""
        return {
            own: replace(
                substituted(self._graph.buffers[name], self._values),
                name=own,
                shares=self._renamed(self._graph.buffers[name].shares),
            )
            for name, own in self._names.items()
            if own != name
        }

    def _renamed(self, name: str | None) -> str | None:
        return None if name is None else self._names[name]

    def inputs(self) -> list[GraphInput]:
        """The inputs that are not shared."""
        own = self._graph.inputs[: self._lanes.own]
        return [replace(entry, buffer=self._renamed(entry.buffer)) for entry in own]

    def outputs(self) -> list[GraphOutput]:
        """The outputs of the lane."""
        first = self._number * self._lanes.own
        return [
            replace(
                substituted(output, self._values),
                buffer=self._renamed(output.buffer),
                mutates=None if output.mutates is None else first + output.mutates,
            )
            for output in self._graph.outputs
        ]

    def group(self, group: KernelGroup) -> KernelGroup:
        """A kernel group of this lane."""
        renamed = rename_group(group, self._names)
        if not isinstance(renamed, MapGroup):
            return renamed

        def member(found: Member) -> Member:
            return replace(found, body=rewrite(found.body, self._number_of_lane))

        return map_group(substituted(renamed, self._values), lambda node: node, member)

    def _number_of_lane(self, scalar: Scalar) -> Scalar | None:
        """A load of a number of the lane's own, where it is among those of all."""
        if not isinstance(scalar, Load) or scalar.buffer != self._numbers:
            return None
        (index,) = scalar.index
        assert isinstance(index, Index)
        position, shared = int(index.expr), self._lanes.shared_numbers
        if position < shared:
            return None
        own = int(self._graph.buffers[scalar.buffer].numel) - shared
        at = as_expr(position + self._number * own)
        return Load(scalar.buffer, (Index(at),), scalar.dtype)
