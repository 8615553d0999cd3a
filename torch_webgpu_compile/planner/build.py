"""Building the `Plan` of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ir.graph import Buffer, BufferOrigin, LoopGraph, Schedule
from ..ir.nodes import BufferArgument, HostCall
from ..plan.model import (
    Dispatch,
    HostBuffer,
    HostStep,
    Kernel,
    KernelCall,
    Plan,
    PlanBuffer,
    PlanInput,
    PlanOutput,
    Step,
)
from .liveness import Interval, assign_slots


def build_plan(schedule: Schedule, calls: Sequence[KernelCall | HostCall]) -> Plan:
    """The plan that runs ``calls`` in order; kernels with equal WGSL and bindings are one."""
    graph = schedule.graph
    kernels: dict[tuple[Any, ...], int] = {}
    table: list[Kernel] = []
    steps: list[Step] = []
    for call in calls:
        if isinstance(call, HostCall):
            steps.append(_host_step(call))
            continue
        key = (call.kernel.wgsl, call.kernel.bindings)
        if key not in kernels:
            kernels[key] = len(table)
            table.append(_unique_name(call.kernel, table))
        steps.append(call.dispatch(kernels[key]))
    buffers = _plan_buffers(graph, steps)
    return Plan(
        name=graph.name,
        kernels=tuple(table),
        buffers=buffers,
        steps=tuple(steps),
        inputs=tuple(PlanInput(i.buffer, i.size) for i in graph.inputs),
        outputs=tuple(
            PlanOutput(o.buffer, o.sizes, o.strides, o.offset, o.size, o.constant, o.mutates)
            for o in graph.outputs
        ),
        constants={
            name: bytes(memoryview(data).cast("B")) if data.nbytes else b""
            for name, data in graph.constants.items()
            if name in buffers
        },
    )


def _unique_name(kernel: Kernel, table: Sequence[Kernel]) -> Kernel:
    return replace(kernel, name=f"{kernel.name}_{len(table)}")


def _host_step(call: HostCall) -> HostStep:
    source = next((o.source for o in call.origins if o.source), "")
    return HostStep(
        call.target,
        call.outputs,
        tuple(_host_argument(a) for a in call.arguments),
        tuple((k, _host_argument(v)) for k, v in call.keywords),
        source,
    )


def _host_argument(value: Any) -> Any:
    if isinstance(value, BufferArgument):
        return HostBuffer(value.buffer)
    if isinstance(value, tuple):
        return tuple(_host_argument(v) for v in value)
    return value


def _step_buffers(step: Step) -> set[str]:
    match step:
        case Dispatch():
            return {b.buffer for b in step.bindings}
        case HostStep():
            return {*step.outputs, *_arguments_buffers((step.arguments, step.keywords))}
        case _:
            return {step.source, step.destination}


def _arguments_buffers(value: Any) -> set[str]:
    if isinstance(value, HostBuffer):
        return {value.buffer}
    if isinstance(value, tuple):
        return set().union(*(_arguments_buffers(v) for v in value))
    return set()


def _plan_buffers(graph: LoopGraph, steps: Sequence[Step]) -> dict[str, PlanBuffer]:
    used: dict[str, list[int]] = {}
    for k, step in enumerate(steps):
        for name in sorted(_step_buffers(step)):
            used.setdefault(name, []).append(k)
    returned = graph.returned
    intervals = [
        Interval(name, graph.buffers[name].nbytes, min(at), max(at))
        for name, at in used.items()
        if graph.buffers[name].origin is BufferOrigin.INTERMEDIATE and name not in returned
    ]
    slots = assign_slots(intervals)
    inputs = {i.buffer for i in graph.inputs if i.buffer is not None}
    kept = [n for n in graph.buffers if n in used or n in returned or n in inputs]
    return {
        name: _plan_buffer(graph.buffers[name], name in returned, slots.get(name)) for name in kept
    }


def _plan_buffer(buffer: Buffer, returned: bool, slot: int | None) -> PlanBuffer:
    role = buffer.origin.value
    if returned and buffer.origin is BufferOrigin.INTERMEDIATE:
        role = "output"
    return PlanBuffer(
        buffer.name,
        role,
        buffer.dtype,
        buffer.sizes,
        buffer.strides,
        buffer.offset,
        buffer.nbytes,
        slot,
    )
