"""`Program`: a plan resolved for one set of sizes and memory, as lists of commands."""

from __future__ import annotations

import struct
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from ..errors import DeviceError
from ..plan.model import Binding, CopyBuffer, Dispatch, HostBuffer, HostStep, Plan, PlanBuffer
from ..sizes import evaluate
from .buffers import MIN_NBYTES, UNIFORM_USAGE, AnyBuffer, GpuBuffer, round_up
from .device import Device
from .interface import Backend, Command, Copy, DispatchRun, Handle
from .pipelines import Pipeline
from .queue import Recording

_SLICE_NBYTES = 256  # WebGPU's guaranteed alignment of a uniform binding's offset
_WINDOW_NBYTES = 16  # kernels may read up to the next multiple of 16 bytes


class BindGroup:
    """Owns a provider's bind group."""

    __slots__ = ("__weakref__", "_backend", "handle")

    def __init__(self, backend: Backend, handle: Handle) -> None:
        self._backend = backend
        self.handle = handle

    def __del__(self) -> None:
        self._backend.release_bind_group(self.handle)


@dataclass(slots=True)
class HostCommand:
    """A host step: plan buffers of its arguments with their nbytes, and of its outputs."""

    step: HostStep
    arguments: list[tuple[str, int]]
    outputs: tuple[str, ...]


Segment = Recording | HostCommand
"""What is recorded at once, or a host step."""


@dataclass(slots=True)
class Program:
    """A resolved plan.

    Attributes:
        sizes: values of the plan's size symbols.
        buffers: the executor's own buffers by plan name; the caller's are not kept alive here.
        segments: in order.
        dispatch_count: dispatches per replay.
        dispatch_steps: for each dispatch made, its index among the plan's `Dispatch` steps.
        groups: keeps the bind groups alive.
    """

    sizes: dict[str, int]
    buffers: dict[str, AnyBuffer]
    segments: list[Segment]
    dispatch_count: int
    dispatch_steps: list[int]
    groups: list[BindGroup]
    parameters: GpuBuffer | None


def buffer_nbytes(buffer: PlanBuffer, sizes: dict[str, int]) -> int:
    """Bytes of a plan buffer, at least 16 and a multiple of 16."""
    return round_up(max(evaluate(buffer.nbytes, sizes), MIN_NBYTES), _WINDOW_NBYTES)


def build_program(
    plan: Plan,
    device: Device,
    sizes: dict[str, int],
    buffers: dict[str, AnyBuffer],
    pipelines: Sequence[Pipeline],
    externals: frozenset[str],
    groups: MutableMapping[tuple[Any, ...], BindGroup],
    parameters: MutableMapping[bytes, GpuBuffer],
) -> Program:
    """Resolves a plan.

    Args:
        buffers: memory for every plan buffer.
        externals: names of those that are the caller's.
        groups, parameters: shared by the programs of an executor, so that equal ones exist once.

    Raises:
        DeviceError: a step breaks a limit of the device.
    """
    return _Builder(plan, device, sizes, buffers, pipelines, groups, parameters).build(externals)


class _Builder:
    def __init__(
        self,
        plan: Plan,
        device: Device,
        sizes: dict[str, int],
        buffers: dict[str, AnyBuffer],
        pipelines: Sequence[Pipeline],
        groups: MutableMapping[tuple[Any, ...], BindGroup],
        parameters: MutableMapping[bytes, GpuBuffer],
    ) -> None:
        self._plan = plan
        self._device = device
        self._sizes = sizes
        self._buffers = buffers
        self._pipelines = pipelines
        self._shared_groups = groups
        self._shared_parameters = parameters
        self._nbytes = {name: buffer_nbytes(b, sizes) for name, b in plan.buffers.items()}
        self._kept: list[BindGroup] = []
        self._segments: list[list[Command] | HostCommand] = []
        self._steps: list[int] = []
        self._uniform: GpuBuffer | None = None
        self._slices: list[int] = []

    def build(self, externals: frozenset[str]) -> Program:
        self._upload_parameters()
        last: Handle = None
        dispatch = -1
        for step in self._plan.steps:
            match step:
                case Dispatch():
                    dispatch += 1
                    last = self._add_dispatch(step, dispatch, last)
                case CopyBuffer():
                    last = self._add_copy(step, last)
                case HostStep():
                    self._segments.append(self._host_command(step))
                    last = None
                case _:
                    assert_never(step)
        segments: list[Segment] = [
            s if isinstance(s, HostCommand) else Recording(s, self._plan.name, self._kept)
            for s in self._segments
        ]
        owned = {name: b for name, b in self._buffers.items() if name not in externals}
        return Program(
            self._sizes,
            owned,
            segments,
            len(self._steps),
            self._steps,
            self._kept,
            self._uniform,
        )

    # ---- parameters

    def _upload_parameters(self) -> None:
        """Packs the parameters of all dispatches into one uniform buffer."""
        packed = bytearray()
        places: dict[bytes, int] = {}
        for step in self._plan.steps:
            if not isinstance(step, Dispatch):
                continue
            data = self._parameter_bytes(step)
            if data and data not in places:
                packed.extend(bytes(-len(packed) % _SLICE_NBYTES))
                places[data] = len(packed)
                packed.extend(data)
            self._slices.append(places.get(data, 0))
        if packed:
            content = bytes(packed)
            uniform = self._shared_parameters.get(content)
            if uniform is None:
                uniform = self._device.allocate_for(len(content), UNIFORM_USAGE)
                self._device.upload(uniform, content)
                self._shared_parameters[content] = uniform
            self._uniform = uniform

    def _parameter_bytes(self, step: Dispatch) -> bytes:
        values = [evaluate(parameter, self._sizes) for parameter in step.parameters]
        kernel = self._plan.kernels[step.kernel]
        if len(values) != kernel.parameter_count:
            raise DeviceError(
                f"kernel {kernel.name} has {kernel.parameter_count} parameters, its step gives "
                f"{len(values)}; this is a bug of the planner"
            )
        try:
            data = struct.pack(f"<{len(values)}i", *values)
        except struct.error as error:
            raise DeviceError(
                f"kernel {kernel.name}: a parameter of {values} does not fit in 32 bits; split the "
                "tensor"
            ) from error
        return data + bytes(-len(data) % 16)

    # ---- steps

    def _commands(self) -> list[Command]:
        if not self._segments or isinstance(self._segments[-1], HostCommand):
            self._segments.append([])
        segment = self._segments[-1]
        assert isinstance(segment, list)
        return segment

    def _add_dispatch(self, step: Dispatch, index: int, last: Handle) -> Handle:
        """Adds a dispatch after one with pipeline ``last`` in the same pass; its pipeline."""
        kernel = self._plan.kernels[step.kernel]
        x, y, z = (evaluate(dimension, self._sizes) for dimension in step.grid)
        if 0 in (x, y, z):
            return last
        limit = self._device.target.max_grid
        if min(x, y, z) < 0 or max(x, y, z) > limit:
            raise DeviceError(
                f"kernel {kernel.name}: a grid of {(x, y, z)} workgroups exceeds {limit} in a "
                "dimension; this is a bug of the planner (the grid must be folded)"
            )
        group = self._bind_group(step, index)
        pipeline = self._pipelines[step.kernel].handle
        commands = self._commands()
        if not commands or not isinstance(commands[-1], DispatchRun):
            commands.append(DispatchRun())
        run = commands[-1]
        assert isinstance(run, DispatchRun)
        run.items.append((None if pipeline is last else pipeline, group.handle, x, y, z))
        self._steps.append(index)
        return pipeline

    def _bind_group(self, step: Dispatch, index: int) -> BindGroup:
        kernel = self._plan.kernels[step.kernel]
        pipeline = self._pipelines[step.kernel]
        ranges = [self._range(binding, kernel.name) for binding in step.bindings]
        self._check_aliases(step, kernel.name)
        if kernel.parameter_count:
            assert self._uniform is not None
            ranges.append(
                (self._uniform, self._slices[index], -(-kernel.parameter_count // 4) * 16)
            )
        key = (id(pipeline), *[(b.serial, offset, nbytes) for b, offset, nbytes in ranges])
        group = self._shared_groups.get(key)
        if group is None:
            entries = [(b.handle, b.offset_nbytes + offset, nbytes) for b, offset, nbytes in ranges]
            backend = self._device.backend
            handle = backend.create_bind_group(pipeline.layout, entries, kernel.name)
            group = self._shared_groups[key] = BindGroup(backend, handle)
        self._kept.append(group)
        return group

    def _range(self, binding: Binding, kernel: str) -> tuple[AnyBuffer, int, int]:
        buffer = self._buffers[binding.buffer]
        offset = binding.offset_nbytes
        left = self._nbytes[binding.buffer] - offset
        if left <= 0:  # a window past the end of a buffer that is small this time: never touched
            return buffer, 0, MIN_NBYTES
        nbytes = left
        if binding.nbytes is not None:
            wanted = round_up(evaluate(binding.nbytes, self._sizes), _WINDOW_NBYTES)
            nbytes = max(MIN_NBYTES, min(wanted, left))
        limit = self._device.target.max_binding_nbytes
        if nbytes - _WINDOW_NBYTES >= limit:
            raise DeviceError(
                f"kernel {kernel}: buffer {binding.buffer} is bound with {nbytes:,} bytes, this "
                f"GPU allows {limit:,}; this is a bug of the planner (it must use windows)"
            )
        return buffer, offset, min(nbytes, limit)

    def _check_aliases(self, step: Dispatch, kernel: str) -> None:
        """WebGPU forbids one buffer as read-only and read-write storage of one dispatch."""
        access: dict[Any, bool] = {}
        declared = self._plan.kernels[step.kernel].bindings
        if len(declared) != len(step.bindings):
            raise DeviceError(
                f"kernel {kernel} has {len(declared)} bindings, its step gives "
                f"{len(step.bindings)}; this is a bug of the planner"
            )
        for binding, declaration in zip(step.bindings, declared, strict=True):
            serial = self._buffers[binding.buffer].serial
            if access.setdefault(serial, declaration.writable) != declaration.writable:
                raise DeviceError(
                    f"kernel {kernel} reads and writes {binding.buffer} through two bindings; give "
                    "bind() distinct buffers, or let the kernel use one read_write binding"
                )

    def _add_copy(self, step: CopyBuffer, last: Handle) -> Handle:
        nbytes = evaluate(self._plan.buffers[step.source].nbytes, self._sizes)
        source, destination = self._buffers[step.source], self._buffers[step.destination]
        if not nbytes or source.serial == destination.serial:
            return last
        copy = Copy(
            source.handle,
            source.offset_nbytes,
            destination.handle,
            destination.offset_nbytes,
            round_up(nbytes, 4),
        )
        self._commands().append(copy)
        return None

    def _host_command(self, step: HostStep) -> HostCommand:
        names = [argument.buffer for argument in host_buffers(step)]
        buffers = self._plan.buffers
        arguments = [(name, evaluate(buffers[name].nbytes, self._sizes)) for name in names]
        return HostCommand(step, arguments, step.outputs)


def host_buffers(step: HostStep) -> list[HostBuffer]:
    """The tensor arguments of a host step: positional before keyword, nested tuples depth first."""
    found: list[HostBuffer] = []

    def visit(value: Any) -> None:
        if isinstance(value, HostBuffer):
            found.append(value)
        elif isinstance(value, tuple):
            for item in value:
                visit(item)

    visit(step.arguments)
    for _, value in step.keywords:
        visit(value)
    return found
