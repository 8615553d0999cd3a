"""Building the `Plan` of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import dtypes
from ..ir.buffers import Buffer, BufferOrigin
from ..ir.graph import GraphOutput, LoopGraph, Schedule, is_effect
from ..ir.nodes import HostCall
from ..plan.model import (
    STATUS,
    STATUS_BUFFER,
    HostStep,
    Kernel,
    KernelCall,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    Role,
    Step,
)
from ..symbolic.nested import rename_buffers
from ..symbolic.sizes import Expr


def build_plan(
    schedule: Schedule, calls: Sequence[KernelCall | HostCall], preparation: Plan | None = None
) -> Plan:
    """The plan that runs ``calls`` in order; kernels with equal WGSL and bindings are one.

    ``preparation``: the plan of what is prepared for it.
    """
    graph = schedule.graph
    names = _memory_names(graph) | {STATUS: STATUS}
    kernels: dict[tuple[Any, ...], int] = {}
    table: list[Kernel] = []
    steps: list[Step] = []
    for call in calls:
        if isinstance(call, HostCall):
            steps.append(_host_step(call, graph, names))
            continue
        key = (call.kernel.wgsl, call.kernel.bindings)
        if key not in kernels:
            kernels[key] = len(table)
            name = f"{call.kernel.name}_{len(table)}"  # unique
            table.append(replace(call.kernel, name=name))
        steps.append(replace(call.step.on(names), kernel=kernels[key]))
    outputs = tuple(_plan_output(output, graph, names) for output in graph.outputs)
    buffers = _plan_buffers(graph, steps, outputs)
    return Plan(
        name=graph.name,
        kernels=tuple(table),
        buffers=buffers,
        steps=tuple(steps),
        inputs=tuple(PlanInput(i.buffer, i.size) for i in graph.inputs),
        outputs=outputs,
        constants={
            name: bytes(memoryview(data).cast("B")) if data.nbytes else b""
            for name, data in graph.constants.items()
            if name in buffers
        },
        preparation=preparation,
    )


def _memory_names(graph: LoopGraph) -> dict[str, str]:
    """Each buffer's name in the plan.

    Several of an intermediate's memory have the name of the result among them: a preparation's
    results are found by their names.
    """
    roots = {name: graph.memory_of(name) for name in graph.buffers}
    shown = {
        roots[name]: name
        for name in graph.returned
        if graph.buffers[roots[name]].origin is BufferOrigin.INTERMEDIATE
    }
    return {name: shown.get(root, root) for name, root in roots.items()}


def _plan_output(o: GraphOutput, graph: LoopGraph, names: Mapping[str, str]) -> PlanOutput:
    strides, offset, buffer = o.strides, o.offset, o.buffer
    if buffer is not None and names[buffer] != buffer:
        buffer = names[buffer]
        if graph.buffers[buffer].origin is BufferOrigin.INPUT:  # written in place: all of it
            strides, offset = graph.buffers[buffer].strides, graph.buffers[buffer].offset
    return PlanOutput(buffer, o.sizes, strides, offset, o.size, o.constant, o.mutates)


def _host_step(call: HostCall, graph: LoopGraph, names: Mapping[str, str]) -> HostStep:
    source = next((o.source for o in call.origins if o.source), "")
    return HostStep(
        call.target,
        () if is_effect(call, graph) else call.outputs,
        rename_buffers(call.arguments, names),
        rename_buffers(call.keywords, names),
        source,
        rename_buffers(call.changed, names),
        call.on_device,
    )


def _plan_buffers(
    graph: LoopGraph, steps: Sequence[Step], outputs: Sequence[PlanOutput]
) -> dict[str, PlanBuffer]:
    used: dict[str, list[int]] = {}
    for k, step in enumerate(steps):
        for name in sorted(set(step.buffers)):
            used.setdefault(name, []).append(k)
    returned = {output.buffer for output in outputs if output.buffer is not None}
    reports = used.pop(STATUS, None)
    intervals = [
        Interval(name, graph.buffers[name].nbytes, min(at), max(at))
        for name, at in used.items()
        if graph.buffers[name].origin is BufferOrigin.INTERMEDIATE and name not in returned
    ]
    slots = assign_slots(intervals)
    given = {i.buffer for i in graph.inputs if i.buffer is not None}
    given |= {n for n, b in graph.buffers.items() if b.origin is BufferOrigin.PREPARED}
    kept = [n for n in graph.buffers if n in used or n in returned or n in given]
    made = {
        name: _plan_buffer(graph.buffers[name], name in returned, slots.get(name)) for name in kept
    }
    return made if reports is None else {**made, STATUS: STATUS_BUFFER}


_ROLES: dict[BufferOrigin, Role] = {
    BufferOrigin.INPUT: "input",
    BufferOrigin.CONSTANT: "constant",
    BufferOrigin.INTERMEDIATE: "intermediate",
    BufferOrigin.PREPARED: "prepared",
}


def _plan_buffer(buffer: Buffer, returned: bool, slot: int | None) -> PlanBuffer:
    role = _ROLES[buffer.origin]
    if returned and role == "intermediate":
        role = "output"
    return PlanBuffer(
        buffer.name,
        role,
        dtypes.BY_NAME[buffer.dtype.name],  # how kernels store it is theirs
        buffer.sizes,
        buffer.strides,
        buffer.offset,
        buffer.nbytes,
        slot,
    )


# ---- which intermediates share memory


@dataclass(frozen=True, slots=True)
class Interval:
    """The steps between which a buffer holds a value, both included."""

    name: str
    nbytes: Expr
    first: int
    last: int


def assign_slots(intervals: Sequence[Interval]) -> dict[str, int]:
    """A slot per buffer such that buffers of one slot are never alive in the same step.

    Best fit in order of first use: the smallest free slot that is large enough, else the largest
    free one, which grows. Buffers of symbolic size only take slots of exactly that size.
    """
    sizes: list[Expr] = []
    free: list[int] = []
    alive: list[tuple[int, int]] = []
    slots: dict[str, int] = {}
    for interval in sorted(intervals, key=lambda i: (i.first, i.last, i.name)):
        for ended in [entry for entry in alive if entry[0] < interval.first]:
            alive.remove(ended)
            free.append(ended[1])
        slot = _choose(interval.nbytes, free, sizes)
        if slot is None:
            slot = len(sizes)
            sizes.append(interval.nbytes)
        else:
            free.remove(slot)
            if interval.nbytes.is_constant and sizes[slot].constant < interval.nbytes.constant:
                sizes[slot] = interval.nbytes
        alive.append((interval.last, slot))
        slots[interval.name] = slot
    return slots


def _choose(nbytes: Expr, free: Sequence[int], sizes: Sequence[Expr]) -> int | None:
    if not nbytes.is_constant:
        return next((s for s in free if sizes[s] is nbytes), None)
    fixed = [s for s in free if sizes[s].is_constant]
    large = [s for s in fixed if sizes[s].constant >= nbytes.constant]
    if large:
        return min(large, key=lambda s: sizes[s].constant)
    return max(fixed, key=lambda s: sizes[s].constant, default=None)
