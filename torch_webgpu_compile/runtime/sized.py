"""`SizedPlan`: a plan with its sizes evaluated, whatever memory it will use."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import DeviceError
from ..plan.entry_point import sliced_kernel
from ..plan.model import (
    FIRST_CHECK,
    Binding,
    Dispatch,
    HostStep,
    Kernel,
    Parameter,
    Plan,
    PlanBuffer,
    bound_nbytes,
    names_of,
)
from ..plan.numbers import HostNumber, number_bits
from ..symbolic.sizes import INT32, evaluate
from ..target import BINDING_ALIGNMENT
from .buffers import MIN_NBYTES, UNIFORM_USAGE, GpuBuffer, round_up
from .device import Device
from .interface import BindGroupMaker, Handle
from .pacing import MAX_SECONDS, Grid, Slice, slices_of
from .pipelines import Pipeline

_WINDOW_NBYTES = 16  # kernels may read up to the next multiple of 16 bytes


_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Memory that a plan needs besides its inputs: for one output, or for one slot.

    Attributes:
        key: the output's name, or the slot of the intermediates.
        nbytes: how much.
        names: the plan buffers in it, at different times.
    """

    key: str | int
    nbytes: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SizedDispatch:
    """A dispatch with a grid that is not empty.

    Attributes:
        index: among the plan's `Dispatch` steps.
        serial: never used twice.
        kernel, step: of the plan.
        pipeline: the provider's; of a variant of the kernel where the step is divided.
        grid: workgroups per dimension.
        buffers: positions, in `SizedPlan.names`, of the plan buffers of its bindings.
        uniform: the last binding: the parameters, if it has any.
        make_group: makes a bind group from the buffers; the executor's lock protects it.
        conflicts: pairs of positions of plan buffers that may not be the same memory: WebGPU
            forbids one buffer as read-only and read-write storage of one dispatch.
        seconds: how long it may take; see `pacing`.
        share: the part of the step's workgroups that it has; see `pacing`.
    """

    index: int
    serial: int
    kernel: Kernel
    step: Dispatch
    pipeline: Handle
    grid: tuple[int, int, int]
    buffers: tuple[int, ...]
    uniform: GpuBuffer | None
    make_group: BindGroupMaker
    conflicts: tuple[tuple[int, int], ...]
    seconds: float = 0.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class SlicedKernel:
    """The variant of a kernel that runs a slice of its grid, compiled."""

    kernel: Kernel
    pipeline: Pipeline


SizedStep = SizedDispatch | HostStep


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """A plan for one set of sizes.

    Attributes:
        sizes: values of the plan's size symbols.
        names: the plan's buffers; last come `Plan.prepared`, then constants, then the status.
        nbytes: of each of them, a multiple of 16; the least for inputs that no step uses.
        steps: in order; those with nothing to do are left out.
        places: what a caller has to give besides inputs if the executor is to own no memory.
    """

    sizes: dict[str, int]
    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    steps: tuple[SizedStep, ...]
    places: tuple[MemoryPlace, ...]


def size_plan(
    plan: Plan,
    device: Device,
    sizes: dict[str, int],
    pipelines: Sequence[Pipeline],
    parameters: MutableMapping[bytes, GpuBuffer],
    sliced: MutableMapping[int, SlicedKernel | None],
) -> SizedPlan:
    """Evaluates a plan.

    Args:
        parameters: shared by all sizes of an executor, so that equal ones exist once.
        sliced: shared as well: by the kernel's number, None for those that cannot be divided.

    Raises:
        DeviceError: a step breaks a limit of the device.
        ShaderError: the variant of a kernel for slices of its grid does not compile.
    """
    return _Sizer(plan, device, sizes, pipelines, parameters, sliced).size()


def touched(plan: Plan) -> set[str]:
    """Buffers that a step uses or an output shows: an input outside of these needs no memory."""
    used = {output.buffer for output in plan.outputs if output.buffer is not None}
    if plan.preparation is not None:
        used.update(entry.buffer for entry in plan.preparation.inputs if entry.buffer)
    return used.union(*(names for step in plan.steps for names in names_of(step)))


@dataclass
class _Sizer:
    """`size_plan`, whose arguments these are."""

    plan: Plan
    device: Device
    sizes: dict[str, int]
    pipelines: Sequence[Pipeline]
    shared_parameters: MutableMapping[bytes, GpuBuffer]
    sliced: MutableMapping[int, SlicedKernel | None]

    def __post_init__(self) -> None:
        buffers = self.plan.buffers
        last = ("constant", "status")
        others = [name for name in buffers if buffers[name].role not in ("prepared", *last)]
        own = [name for role in last for name in buffers if buffers[name].role == role]
        names = [*others, *self.plan.prepared, *own]
        self._positions = {name: position for position, name in enumerate(names)}
        inputs = {name for name, buffer in buffers.items() if buffer.role == "input"}
        untouched = inputs - touched(self.plan)  # as the target of ``copy_``
        self._nbytes = {
            name: MIN_NBYTES if name in untouched else _buffer_nbytes(buffers[name], self.sizes)
            for name in names
        }

    def size(self) -> SizedPlan:
        dispatches = [step for step in self.plan.steps if isinstance(step, Dispatch)]
        seconds = [self._seconds(step) for step in dispatches]
        cuts = self._cut(dispatches, seconds) if max(seconds, default=0.0) > MAX_SECONDS else {}
        uniform, offsets, of_slices = self._upload_parameters(dispatches, cuts)
        steps: list[SizedStep] = []
        index = -1
        for step in self.plan.steps:
            match step:
                case Dispatch():
                    index += 1
                    whole = self._dispatch(step, index, uniform, offsets[index], seconds[index])
                    if whole is None:
                        continue
                    if index in cuts:
                        steps += self._divide(whole, cuts[index], uniform, of_slices[index])
                    else:
                        steps.append(whole)
                case HostStep():
                    steps.append(step)
                case _:
                    raise DeviceError(f"plan {self.plan.name} is composed; run it as such")
        return SizedPlan(
            self.sizes,
            tuple(self._nbytes),
            tuple(self._nbytes.values()),
            tuple(steps),
            self._places(),
        )

    def _places(self) -> tuple[MemoryPlace, ...]:
        names: dict[str | int, list[str]] = {}
        for name, buffer in self.plan.buffers.items():
            if buffer.role in ("intermediate", "output"):
                is_own = buffer.role == "output" or buffer.slot is None
                names.setdefault(name if is_own else buffer.slot or 0, []).append(name)
        return tuple(
            MemoryPlace(key, max(self._nbytes[name] for name in group), tuple(group))
            for key, group in names.items()
        )

    # ---- parameters

    def _upload_parameters(
        self, dispatches: Sequence[Dispatch], cuts: Mapping[int, list[Slice]]
    ) -> tuple[GpuBuffer | None, list[int], dict[int, list[int]]]:
        """One uniform buffer with the parameters of all dispatches; where they are in it, in bytes.

        The offset of each dispatch; and those of the slices of the ones that are divided.
        """
        packed = bytearray()
        places: dict[bytes, int] = {}

        def place(data: bytes) -> int:
            if data and data not in places:
                packed.extend(bytes(-len(packed) % BINDING_ALIGNMENT))
                places[data] = len(packed)
                packed.extend(data)
            return places.get(data, 0)

        offsets = []
        of_slices: dict[int, list[int]] = {}
        for index, step in enumerate(dispatches):
            data = self._parameter_bytes(step)
            offsets.append(place(data))
            if index in cuts:
                grid = self._grid(step)
                of_slices[index] = [place(data + part.words(grid)) for part in cuts[index]]
        if not packed:
            return None, offsets, of_slices
        whole = bytes(packed)
        uniform = self.shared_parameters.get(whole)
        if uniform is None:
            uniform = self.device.upload_new(whole, UNIFORM_USAGE)
            self.shared_parameters[whole] = uniform
        return uniform, offsets, of_slices

    def _parameter_bytes(self, step: Dispatch) -> bytes:
        sizes = self.sizes
        if step.checks:
            number = self.device.status.first_number(step.checks)
            sizes = {**sizes, FIRST_CHECK.name: number}
        values = [_parameter_value(parameter, sizes) for parameter in step.parameters]
        kernel = self.plan.kernels[step.kernel]
        relied_on = [_parameter_value(number, sizes) for number in step.narrow]
        wide = [number for number in (*values, *relied_on) if number not in INT32]
        if wide:
            raise DeviceError(
                f"kernel {kernel.name} computes with 32-bit integers, and for these sizes needs "
                f"{wide[0]}; split the tensor, or compile with dynamic=False"
            )
        data = struct.pack(f"<{len(values)}i", *values)
        return data + bytes(-len(data) % 16)

    # ---- steps

    def _dispatch(
        self, step: Dispatch, index: int, uniform: GpuBuffer | None, offset: int, seconds: float
    ) -> SizedDispatch | None:
        kernel = self.plan.kernels[step.kernel]
        x, y, z = self._grid(step)
        if 0 in (x, y, z):
            return None
        limit = self.device.target.max_grid
        if min(x, y, z) < 0 or max(x, y, z) > limit:
            raise DeviceError(
                f"kernel {kernel.name}: a grid of {(x, y, z)} workgroups exceeds {limit} in a "
                "dimension; this is a bug of the planner (the grid must be folded)"
            )
        self._check_loops(step, kernel)
        pipeline = self.pipelines[step.kernel]
        return SizedDispatch(
            index,
            next(_serials),
            kernel,
            step,
            pipeline.handle,
            (x, y, z),
            tuple(self._positions[binding.buffer] for binding in step.bindings),
            uniform if kernel.parameter_count else None,
            self._group_maker(step, kernel, pipeline, offset),
            self._conflicts(step),
            seconds,
        )

    def _grid(self, step: Dispatch) -> Grid:
        x, y, z = (evaluate(dimension, self.sizes) for dimension in step.grid)
        return x, y, z

    def _group_maker(
        self, step: Dispatch, kernel: Kernel, pipeline: Pipeline, offset: int
    ) -> BindGroupMaker:
        """``offset``: of the kernel's parameters, bytes."""
        ranges = [self._range(binding, kernel.name) for binding in step.bindings]
        if kernel.parameter_count:
            ranges.append((offset, -(-kernel.parameter_count // 4) * 16))
        return self.device.backend.bind_group_maker(pipeline.layout, ranges, kernel.name)

    def _seconds(self, step: Dispatch) -> float:
        nbytes, flops = (
            sum(_parameter_value(expression, self.sizes) for expression in expressions)
            for expressions in ((step.bytes_read, step.bytes_written), (step.flops,))
        )
        return self.device.pace.seconds(nbytes, flops)

    # ---- long dispatches

    def _cut(
        self, dispatches: Sequence[Dispatch], seconds: Sequence[float]
    ) -> dict[int, list[Slice]]:
        """The slices of the dispatches that would take too long; compiles their kernels."""
        found: dict[int, list[Slice]] = {}
        missing: dict[int, Kernel] = {}
        limit = self.device.target.max_grid
        for index, step in enumerate(dispatches):
            grid = self._grid(step)
            if seconds[index] <= MAX_SECONDS or min(grid) <= 0 or max(grid) > limit:
                continue
            most = math.floor(math.prod(grid) * MAX_SECONDS / seconds[index])
            parts = slices_of(grid, max(1, most))
            if len(parts) == 1:
                continue
            found[index] = parts
            if step.kernel not in self.sliced:
                kernel = sliced_kernel(self.plan.kernels[step.kernel])
                if kernel is None:
                    self.sliced[step.kernel] = None
                else:
                    missing[step.kernel] = kernel
        pipelines = self.device.pipelines.compile_many(list(missing.values()))
        for (number, kernel), pipeline in zip(missing.items(), pipelines, strict=True):
            self.sliced[number] = SlicedKernel(kernel, pipeline)
        return {k: parts for k, parts in found.items() if self.sliced[dispatches[k].kernel]}

    def _divide(
        self,
        whole: SizedDispatch,
        parts: Sequence[Slice],
        uniform: GpuBuffer | None,
        offsets: Sequence[int],
    ) -> list[SizedDispatch]:
        """One dispatch for each slice; ``offsets``: of their parameters, bytes."""
        step = whole.step
        sliced = self.sliced[step.kernel]
        assert sliced is not None
        return [
            replace(
                whole,
                serial=next(_serials),
                pipeline=sliced.pipeline.handle,
                grid=part.grid,
                uniform=uniform,
                make_group=self._group_maker(step, sliced.kernel, sliced.pipeline, offset),
                seconds=whole.seconds * part.share(whole.grid),
                share=part.share(whole.grid),
            )
            for part, offset in zip(parts, offsets, strict=True)
        ]

    def _check_loops(self, step: Dispatch, kernel: Kernel) -> None:
        iterations = evaluate(step.iterations, self.sizes)
        limit = self.device.target.max_loop_iterations
        if limit and iterations > limit:
            raise DeviceError(
                f"kernel {kernel.name} would loop {iterations:,} times in an invocation at these "
                f"sizes, and {self.device.target.name} ends loops after {limit:,} without an "
                "error; compile for these sizes (dynamic=False), or split the tensor"
            )

    def _range(self, binding: Binding, kernel: str) -> tuple[int, int]:
        """(offset in bytes, nbytes) of a binding."""
        offset = binding.offset_nbytes
        left = self._nbytes[binding.buffer] - offset
        if left <= 0:  # a window past the end of a buffer that is small this time: never touched
            return 0, MIN_NBYTES
        nbytes = bound_nbytes(binding, self.plan.buffers[binding.buffer], self.sizes)
        limit = self.device.target.max_binding_nbytes
        if nbytes > limit:
            raise DeviceError(
                f"kernel {kernel}: buffer {binding.buffer} is bound with {nbytes:,} bytes, this "
                f"GPU allows {limit:,}; this is a bug of the planner (it must use windows)"
            )
        return offset, min(max(MIN_NBYTES, round_up(nbytes, _WINDOW_NBYTES)), left, limit)

    def _conflicts(self, step: Dispatch) -> tuple[tuple[int, int], ...]:
        kernel = self.plan.kernels[step.kernel]
        pairs = zip(step.bindings, kernel.bindings, strict=True)
        access = [(self._positions[b.buffer], declared.writable) for b, declared in pairs]
        read = dict.fromkeys(position for position, writable in access if not writable)
        written = dict.fromkeys(position for position, writable in access if writable)
        return tuple((a, b) for a in read for b in written)


def _parameter_value(parameter: Parameter, sizes: Mapping[str, int]) -> int:
    """0 for a quotient by an empty dimension, none of whose elements a kernel computes."""
    with suppress(ZeroDivisionError):
        if isinstance(parameter, HostNumber):
            return number_bits(parameter, sizes)
        return evaluate(parameter, sizes)
    return 0


def _buffer_nbytes(buffer: PlanBuffer, sizes: dict[str, int]) -> int:
    """Bytes of a plan buffer, at least 16 and a multiple of 16."""
    return round_up(max(buffer.nbytes_for(sizes), MIN_NBYTES), _WINDOW_NBYTES)
