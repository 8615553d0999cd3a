"""`Executor`: runs a `Plan` on a `Device`.

    executor = Executor(plan, device)
    with executor.lock:
        bound = executor.bind(sizes, {"x": x_buffer})
        bound.replay()
        device.download(bound.buffer("y"), destination)

Everything is resolved before the call: `bind` evaluates sizes, places buffers and makes bind
groups, once per set of sizes and of memory; `replay` only records commands.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..plan.model import HostStep, Plan
from .buffers import AnyBuffer, GpuBuffer
from .device import Device
from .program import BindGroup, HostCommand, Program, buffer_nbytes, build_program

HostCall = Callable[[HostStep, list[Any], dict[str, int]], Sequence[Any]]
"""(step, its `HostBuffer`s' contents in order as uint8 arrays, sizes) → its outputs' contents."""

_MAX_PROGRAMS = 16


class Executor:
    """Runs one plan.

    Args:
        plan: what to run.
        device: where.
        host_call: runs `HostStep`s; may be None for a plan without any.

    Attributes:
        lock: hold it over upload → replay → download when several threads use this executor: its
            buffers are the same for all calls.

    Raises:
        ShaderError: a kernel does not compile.
        DeviceError: the plan has host steps and there is no ``host_call``.
    """

    def __init__(self, plan: Plan, device: Device, host_call: HostCall | None = None) -> None:
        host_steps = [step.target for step in plan.steps if isinstance(step, HostStep)]
        if host_steps and host_call is None:
            raise DeviceError(
                f"plan {plan.name} runs {host_steps[0]} on the host, but the executor has no "
                "host_call; pass one"
            )
        self.plan = plan
        self.device = device
        self.lock = threading.RLock()
        self._host_call = host_call
        self._pipelines = device.compile_many(plan.kernels)
        self._constants: dict[str, GpuBuffer] = {}
        self._owned: dict[str | int, GpuBuffer] = {}
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self._groups: weakref.WeakValueDictionary[tuple[Any, ...], BindGroup] = (
            weakref.WeakValueDictionary()
        )
        self._parameters: weakref.WeakValueDictionary[bytes, GpuBuffer] = (
            weakref.WeakValueDictionary()
        )
        for name, data in plan.constants.items():
            buffer = self._constants[name] = device.allocate(len(data))
            device.upload(buffer, data)
        device.add_reclaimable(self)

    def bind(
        self,
        sizes: Mapping[str, int] | None = None,
        externals: Mapping[str, AnyBuffer] | None = None,
    ) -> BoundPlan:
        """The plan with its sizes and memory resolved, ready to replay.

        Args:
            sizes: the value of every size symbol of the plan.
            externals: the caller's memory for inputs, or for outputs that the caller keeps. Buffers
                that are not given belong to the executor; their contents last until its next call.

        Raises:
            DeviceError: a given buffer is released, too small, or bound for reading and for writing
                by one kernel.
            OutOfMemoryError: the plan's own buffers do not fit.
        """
        sizes = sizes or {}
        externals = externals or {}
        serials = tuple([buffer.serial for buffer in externals.values()])
        key = (tuple(sizes.items()), tuple(externals), serials)
        with self.lock:
            program = self._programs.get(key)
            if program is not None and 0 not in serials:
                self._programs.move_to_end(key)
            else:
                program = self._build(dict(sizes), externals)
                self._programs[key] = program
                if len(self._programs) > _MAX_PROGRAMS:
                    self._programs.popitem(last=False)
        return BoundPlan(self, program, externals)

    def _build(self, sizes: dict[str, int], externals: Mapping[str, AnyBuffer]) -> Program:
        buffers = self._place(sizes, externals)
        return build_program(
            self.plan,
            self.device,
            sizes,
            buffers,
            self._pipelines,
            frozenset(externals),
            self._groups,
            self._parameters,
        )

    def _place(
        self, sizes: dict[str, int], externals: Mapping[str, AnyBuffer]
    ) -> dict[str, AnyBuffer]:
        """A buffer for every plan buffer."""
        needed: dict[str | int, int] = {}
        placed: dict[str, AnyBuffer] = {}
        for name, buffer in self.plan.buffers.items():
            nbytes = buffer_nbytes(buffer, sizes)
            given = externals.get(name, self._constants.get(name))
            if given is None:
                place = name if buffer.slot is None else buffer.slot
                needed[place] = max(needed.get(place, 0), nbytes)
            elif given.capacity < nbytes:
                raise DeviceError(
                    f"plan {self.plan.name}: buffer {name} needs {nbytes} bytes, the one given has "
                    f"{given.nbytes}; check the sizes given to bind()"
                )
            else:
                placed[name] = given
        unknown = set(externals) - set(self.plan.buffers)
        if unknown:
            raise DeviceError(f"plan {self.plan.name} has no buffers {sorted(unknown)}")
        self._grow(needed)
        for name, buffer in self.plan.buffers.items():
            if name not in placed:
                placed[name] = self._owned[name if buffer.slot is None else buffer.slot]
        return placed

    def _grow(self, needed: dict[str | int, int]) -> None:
        """Makes the executor's own buffers large enough. Programs with the old ones are dropped."""
        small = [
            place
            for place, nbytes in needed.items()
            if place not in self._owned or self._owned[place].capacity < nbytes
        ]
        if any(place in self._owned for place in small):
            self._programs.clear()
        for place in small:
            self._owned.pop(place, None)
        for place in small:
            self._owned[place] = self.device.allocate(needed[place])

    def reclaim(self) -> None:
        """Drops cached programs and the executor's own buffers; bound plans in use keep theirs."""
        if self.lock.acquire(blocking=False):  # another thread is calling it: leave it alone
            try:
                self._programs.clear()
                self._owned.clear()
            finally:
                self.lock.release()

    def run_host_step(self, command: HostCommand, bound: BoundPlan) -> None:
        """Downloads the arguments of a host step, runs it and uploads its results."""
        assert self._host_call is not None
        step = command.step
        arrays = [np.empty(nbytes, np.uint8) for _, nbytes in command.arguments]
        self.device.download_many(
            [
                (bound.buffer(name), 0, nbytes, array.__array_interface__["data"][0])
                for (name, nbytes), array in zip(command.arguments, arrays, strict=True)
            ]
        )
        results = self._host_call(step, list(arrays), bound.program.sizes)
        if len(results) != len(command.outputs):
            raise DeviceError(
                f"host step {step.target} gave {len(results)} results, the plan expects "
                f"{len(command.outputs)}"
            )
        for name, result in zip(command.outputs, results, strict=True):
            self.device.upload(bound.buffer(name), result)


class BoundPlan:
    """A plan with sizes and memory. Keeps the caller's buffers alive while it is held."""

    __slots__ = ("_executor", "_externals", "program")

    def __init__(
        self, executor: Executor, program: Program, externals: Mapping[str, AnyBuffer]
    ) -> None:
        self._executor = executor
        self._externals = dict(externals)
        self.program = program

    @property
    def dispatch_count(self) -> int:
        """Dispatches per replay (those with an empty grid are not made)."""
        return self.program.dispatch_count

    @property
    def executor(self) -> Executor:
        """Whose plan this is."""
        return self._executor

    def buffer(self, name: str) -> AnyBuffer:
        """The memory of a plan buffer: the caller's own where it was given to `Executor.bind`."""
        given = self._externals.get(name)
        return given if given is not None else self.program.buffers[name]

    def replay(self) -> None:
        """Records the plan's commands (see `CommandQueue`). Waits only for host steps.

        Raises:
            DeviceError, DeviceLostError: the device refused these or earlier commands; the executor
                stays usable.
        """
        executor = self._executor
        record = executor.device.queue.record
        with executor.lock:
            for segment in self.program.segments:
                if isinstance(segment, HostCommand):
                    executor.run_host_step(segment, self)
                else:
                    record(segment)
