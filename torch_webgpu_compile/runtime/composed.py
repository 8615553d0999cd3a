"""`ComposedExecutor`: runs a composed `Plan` on a `Device`.

    executor = ComposedExecutor(plan, device, host)
    results = executor([GpuTensor(buffer, float32, (4, 8), (8, 1)), 3])

Nested plans run through an `Executor` each. What is between them is decided here, with the layouts
that tensors have in the call. Steps record commands; only those that read a number wait.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, assert_never

import numpy as np

from ..counters import counters
from ..dtypes import DType, float32, int32
from ..errors import DeviceError, SharedMemoryError
from ..plan.demands import SymbolicDemands
from ..plan.lru_cache import LruCache, max_resolved_sizes
from ..plan.model import (
    Branch,
    Check,
    Compute,
    Dispatch,
    Floats,
    HostStep,
    Loop,
    Plan,
    PlanOutput,
    ReadNumber,
    Run,
    Seeds,
    SizeOf,
    names_of,
    view_at,
)
from ..plan.numbers import python_number
from ..plan.size_sources import SizeSource, size_sources
from ..symbolic.sizes import are_alike, evaluate, storage_span
from ..target import BINDING_ALIGNMENT
from .buffers import AnyBuffer, BufferSlice, GpuBuffer, round_up
from .device import Device
from .executor import Executor, KnownCall
from .launcher import Launcher, RunHostStep


@dataclass(frozen=True, slots=True)
class GpuTensor:
    """A tensor in GPU memory: sizes, strides and the first element's offset, in elements."""

    memory: GpuBuffer
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def span(self) -> int:
        """Bytes from the first to the last element."""
        return storage_span(self.shape, self.strides) * self.dtype.itemsize

    @property
    def offset_nbytes(self) -> int:
        """Bytes from the start of the memory to the first element."""
        return self.offset * self.dtype.itemsize


Value = GpuTensor | int | float | None
"""What a name of a composed plan stands for; None is an output that is nothing."""

PlanAt = Any
"""Makes a nested plan for sizes at which that with symbols cannot run: of sizes, a `Plan`."""


class Host(Protocol):
    """What the process around a plan does for it."""

    def calls_of(self, plan: Plan) -> RunHostStep | None:
        """What runs the host steps of a nested plan."""

    def run(self, step: HostStep, values: Mapping[str, Any]) -> Sequence[Value]:
        """The results of a host step, of named tensors and numbers."""

    def laid_out(self, tensor: GpuTensor, dtype: DType, strides: tuple[int, ...]) -> GpuTensor:
        """A copy of a tensor in another layout, or of another dtype, at the start of memory."""

    def seeds(self, count: int) -> bytes:
        """New seeds: rows of two 32-bit words."""


class ComposedExecutor:
    """Runs one composed plan, for several threads.

    Args:
        plan: what to run.
        device: where.
        host: what the process does for it.
        plan_at: by the names of nested plans with symbols, what makes them for some sizes.

    Attributes:
        lock: hold it over a call whose arguments others change.
    """

    def __init__(
        self, plan: Plan, device: Device, host: Host, plan_at: Mapping[str, PlanAt] | None = None
    ) -> None:
        self.plan = plan
        self.device = device
        self.lock = threading.RLock()
        self._host = host
        known: dict[int, _Part] = {}
        for inner in plan.plans or ():
            if id(inner) not in known:
                known[id(inner)] = _part_of(inner, device, host, plan_at or {})
        self._parts = [known[id(inner)] for inner in plan.plans or ()]
        self._sources = size_sources(plan)
        self._inputs = [entry.buffer for entry in plan.inputs]
        self._dead = _last_reads(plan)
        device.add_reclaimable(self)

    def reclaim(self) -> None:
        """Drops what was resolved for sizes (`Device.empty_cache`)."""
        for part in self._parts:
            part.reclaim()

    def known_call(self, name: str) -> KnownCall | None:
        """An earlier call of a nested plan; None where there was none."""
        found = (part.known_call(name) for part in self._parts)
        return next((call for call in found if call is not None), None)

    def __call__(self, arguments: Sequence[Value]) -> list[Value]:
        """Runs the plan.

        Returns:
            Its outputs, in order. Those that the steps write in place are in the argument's memory,
            and no other shares memory with an argument, or with what is written.

        Raises:
            RuntimeError: a `Check` fails.
            DeviceError: the device refused these or earlier commands.
        """
        results = self.run(arguments)
        own = {id(value.memory) for value in arguments if isinstance(value, GpuTensor)}
        memory = [id(value.memory) for value in results if isinstance(value, GpuTensor)]
        loans = Counter(memory)
        for k, output in enumerate(self.plan.outputs):
            value = results[k]
            if not isinstance(value, GpuTensor):
                continue
            if output.mutates is not None:
                argument = arguments[output.mutates]
                assert isinstance(argument, GpuTensor)
                if value.memory is argument.memory:
                    continue
            elif id(value.memory) not in own:
                continue
            if id(value.memory) in own or loans[id(value.memory)] > 1:
                results[k] = _copied(self.device, value)
        return results

    def run(self, arguments: Sequence[Value]) -> list[Value]:
        """`__call__`, but for the promise of what shares memory."""
        values: dict[str, Any] = {s.name: _size(s, arguments) for s in self._sources}
        for name, value in zip(self._inputs, arguments, strict=True):
            if name is not None:
                values[name] = value
        for step, dead in zip(self.plan.steps, self._dead, strict=True):
            match step:
                case Run():
                    made = self._call(step.plan, step.arguments, values)
                    values.update(zip(step.results, made, strict=True))
                case Branch():
                    position = int(self._number(values[step.index]))
                    if not 0 <= position < len(step.plans):
                        raise RuntimeError(f"there is no branch {position} of {len(step.plans)}")
                    made = self._call(step.plans[position], step.arguments, values)
                    values.update(zip(step.results, made, strict=True))
                case Loop():
                    values.update(zip(step.results, self._loop(step, values), strict=True))
                case ReadNumber():
                    values[step.name] = self._number(values[step.buffer])
                case SizeOf():
                    tensor = values[step.buffer]
                    numbers = tensor.shape if step.field == "size" else tensor.strides
                    values[step.name] = numbers[step.dim]
                case Compute():
                    values[step.name] = python_number(step.value, values)
                case Floats():
                    values[step.name] = self._floats([values[name] for name in step.numbers])
                case Seeds():
                    data = self._host.seeds(step.count)
                    memory = self.device.upload_new(data)
                    values[step.name] = GpuTensor(memory, int32, (step.count, 2), (2, 1))
                case Check():
                    if not values[step.condition]:
                        raise RuntimeError(step.message)
                case HostStep():
                    values.update(zip(step.outputs, self._host.run(step, values), strict=True))
                case Dispatch():
                    raise DeviceError(f"plan {self.plan.name} is composed, and has a dispatch")
                case _:
                    assert_never(step)
            for name in dead:
                values.pop(name, None)
        return [_result(output, values) for output in self.plan.outputs]

    def _call(self, number: int, names: Sequence[str], values: Mapping[str, Any]) -> list[Value]:
        part = self._parts[number]
        arguments = [values[name] for name in names]
        for k in part.changed:
            memory = arguments[k].memory
            others = [v for v in values.values() if isinstance(v, GpuTensor) and v.memory is memory]
            if len(others) > 1:  # it has other names, by which its old contents are known
                arguments[k] = _copied(self.device, arguments[k])
        return part.run(arguments)

    def _loop(self, step: Loop, values: Mapping[str, Any]) -> list[Value]:
        carried = [values[name] for name in step.carried]
        others = [values[name] for name in step.others]
        body = self._parts[step.body]
        turn, most = 0, math.inf if step.count is None else values[step.count]
        while turn < most:
            if step.condition is not None:
                (holds,) = self._parts[step.condition].run([*carried, *others])
                if not self._number(holds):
                    break
            for k in step.stacked:
                if turn == carried[k].shape[0]:
                    carried[k] = self._with_more_rows(carried[k])
            carried = body.run([*carried, *others])
            turn += 1
        for k in step.stacked:
            carried[k] = replace(carried[k], shape=(max(turn, 1), *carried[k].shape[1:]))
        return carried

    def _with_more_rows(self, tensor: GpuTensor) -> GpuTensor:
        """A tensor without gaps with twice as many rows."""
        grown = replace(tensor, shape=(2 * tensor.shape[0], *tensor.shape[1:]), offset=0)
        memory = self.device.allocate(grown.span)
        if tensor.span:
            nbytes = round_up(tensor.span, 4)
            self.device.copy(tensor.memory, tensor.offset_nbytes, memory, 0, nbytes)
        return replace(grown, memory=memory)

    def _number(self, value: Any) -> Any:
        """A number, or the one in a tensor of one element, for which it waits."""
        if not isinstance(value, GpuTensor):
            return value
        data = np.empty(value.dtype.itemsize, np.uint8)
        address = data.__array_interface__["data"][0]
        self.device.download_many([(value.memory, value.offset_nbytes, data.size, address)])
        counters.add(bytes_downloaded=data.size)
        return number_of_bytes(data, value.dtype)

    def _floats(self, numbers: Sequence[float]) -> GpuTensor:
        with np.errstate(over="ignore"):
            data = np.asarray(numbers, np.float64).astype(np.float32).tobytes()
        return GpuTensor(self.device.upload_new(data), float32, (len(numbers),), (1,))


def _copied(device: Device, tensor: GpuTensor) -> GpuTensor:
    """The same in memory of its own."""
    end = tensor.offset_nbytes + tensor.span
    memory = device.allocate(end)
    if tensor.span:
        start = tensor.offset_nbytes // 4 * 4
        device.copy(tensor.memory, start, memory, start, round_up(end - start, 4))
    return replace(tensor, memory=memory)


def number_of_bytes(data: np.ndarray[Any, Any], dtype: DType) -> int | float:
    """The number whose bytes these are; a bool is an integer."""
    if dtype.name == "bfloat16":
        return float((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0])
    return data.view("u1" if dtype.name == "bool" else dtype.name)[0].item()  # type: ignore[no-any-return]


def _size(source: SizeSource, arguments: Sequence[Any]) -> Any:
    value = arguments[source.position]
    match source.field:
        case "size":
            value = value.shape[source.dim]
        case "stride":
            value = value.strides[source.dim]
        case "offset":
            value = value.offset
    if source.coefficient == 1 and not source.constant:
        return value
    return (value - source.constant) // source.coefficient


def _result(output: PlanOutput, values: Mapping[str, Any]) -> Value:
    found: Value = output.constant if output.buffer is None else values[output.buffer]
    return found


def _last_reads(plan: Plan) -> list[list[str]]:
    """Of each step, the names that nobody needs after it."""
    kept = {output.buffer for output in plan.outputs}
    found: list[list[str]] = [[] for _ in plan.steps]
    for k in reversed(range(len(plan.steps))):
        for name in dict.fromkeys((*names_of(plan.steps[k])[0], *names_of(plan.steps[k])[1])):
            if name not in kept:
                found[k].append(name)
                kept.add(name)
    return found


# ---- nested plans


class _Part(Protocol):
    """A nested plan.

    Attributes:
        changed: positions of the arguments that it changes in place.
    """

    @property
    def changed(self) -> Sequence[int]: ...

    def run(self, arguments: Sequence[Any]) -> list[Value]: ...
    def reclaim(self) -> None: ...
    def known_call(self, name: str) -> KnownCall | None: ...


def _part_of(plan: Plan, device: Device, host: Host, plan_at: Mapping[str, PlanAt]) -> _Part:
    if plan.plans is not None:
        return _ComposedPart(plan, device, host, plan_at)
    return PlainExecutor(plan, device, host, plan_at.get(plan.name))


class _ComposedPart(ComposedExecutor):
    changed: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Input:
    """An argument of a nested plan, as it expects it.

    ``place``: among the launcher's buffers.
    """

    position: int
    place: int
    dtype: DType
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Output:
    """A result: a number, or a tensor in the memory at ``place``, or in ``memory``.

    ``nbytes``: what to copy of it, where it may not be given away.
    """

    number: Any = None
    place: int | None = None
    memory: GpuBuffer | None = None
    layout: tuple[DType, tuple[int, ...], tuple[int, ...], int] | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A nested plan at some sizes."""

    launcher: Launcher
    inputs: tuple[_Input, ...]
    new: tuple[tuple[int, tuple[int, ...]], ...]
    outputs: tuple[_Output, ...]


class PlainExecutor:
    """Runs a plan of kernels, nested or not, on tensors and numbers.

    Args:
        plan, device, host: as of `ComposedExecutor`.
        plan_at: makes the plan for sizes at which it cannot run; None where it always can.
    """

    def __init__(
        self, plan: Plan, device: Device, host: Host, plan_at: PlanAt | None = None
    ) -> None:
        self._plan, self._device, self._host, self._plan_at = plan, device, host, plan_at
        self._executor = Executor(plan, device, host.calls_of(plan))
        self._sources = size_sources(plan)
        self._demands = SymbolicDemands(plan)
        self._resolved = LruCache[tuple[Any, ...], "_Resolved | PlainExecutor"](
            max_resolved_sizes(plan.dispatch_count)
        )
        self._waits = any(isinstance(step, HostStep) for step in plan.steps)
        self.changed = tuple(
            output.mutates
            for output in plan.outputs
            if output.mutates is not None and plan.inputs[output.mutates].buffer == output.buffer
        )

    def reclaim(self) -> None:
        """Drops what was made for sizes."""
        self._resolved.clear()

    def known_call(self, name: str) -> KnownCall | None:
        """See `ComposedExecutor.known_call`."""
        if self._plan.name != name or not self._resolved:
            return None
        return self._executor.known_call(self._sizes(next(reversed(self._resolved))))

    def _sizes(self, key: tuple[Any, ...]) -> dict[str, int]:
        return {source.name: size for source, size in zip(self._sources, key, strict=True)}

    def run(self, arguments: Sequence[Any]) -> list[Value]:
        """See `ComposedExecutor`."""
        key = tuple([_size(source, arguments) for source in self._sources])
        found = self._resolved.find(key)
        if found is None:
            found = self._resolved.keep(key, self._resolve(key))
        if isinstance(found, PlainExecutor):
            return found.run(arguments)
        if self._waits:
            with self._executor.lock:
                return self._launch(found, arguments)
        return self._launch(found, arguments)

    def _launch(self, resolved: _Resolved, arguments: Sequence[Any]) -> list[Value]:
        buffers: list[Any] = [None] * len(resolved.launcher.names)
        for entry in resolved.inputs:
            buffers[entry.place] = self._placed(arguments[entry.position], entry)
        for nbytes, places in resolved.new:
            memory = self._device.allocate(nbytes)
            for place in places:
                buffers[place] = memory
        launcher = resolved.launcher
        if launcher.prepared:
            memory_of = dict(zip(launcher.names, buffers, strict=True))
            buffers += self._executor.prepared(memory_of).values()
        try:
            launcher.run(buffers)
        except SharedMemoryError:
            for entry in resolved.inputs:
                if entry.position in self.changed:
                    copy = _copied(self._device, arguments[entry.position])
                    buffers[entry.place] = self._placed(copy, entry)
            launcher.run(buffers)
        counters.dispatches += launcher.dispatch_count
        return [self._result(output, buffers) for output in resolved.outputs]

    def _placed(self, tensor: GpuTensor, entry: _Input) -> AnyBuffer:
        """The memory of an argument from its first element on, laid out as the plan expects it."""
        if tensor.dtype is not entry.dtype or not are_alike(
            tensor.shape, tensor.strides, entry.strides
        ):
            return self._host.laid_out(tensor, entry.dtype, entry.strides).memory
        start = tensor.offset_nbytes
        if not start:
            return tensor.memory
        if start % BINDING_ALIGNMENT == 0:
            return tensor.memory.slice(start)
        if start % 4:
            return self._host.laid_out(tensor, entry.dtype, entry.strides).memory
        memory = self._device.allocate(tensor.span)
        if tensor.span:
            self._device.copy(tensor.memory, start, memory, 0, round_up(tensor.span, 4))
        return memory

    def _result(self, output: _Output, buffers: Sequence[AnyBuffer]) -> Value:
        if output.layout is None:
            number: Value = output.number
            return number
        source = output.memory if output.place is None else buffers[output.place]
        assert source is not None
        dtype, shape, strides, offset = output.layout
        if output.nbytes:
            memory = self._device.allocate(output.nbytes)
            self._device.copy(source, 0, memory, 0, round_up(output.nbytes, 4))
            return GpuTensor(memory, dtype, shape, strides, offset)
        if isinstance(source, BufferSlice):
            offset += source.offset_nbytes // dtype.itemsize
        return GpuTensor(source.memory, dtype, shape, strides, offset)

    def _resolve(self, key: tuple[Any, ...]) -> _Resolved | PlainExecutor:
        plan = self._plan
        sizes = self._sizes(key)
        if self._plan_at is not None and not self._demands.at(sizes).are_met(self._device.target):
            return PlainExecutor(self._plan_at(sizes), self._device, self._host)
        launcher = self._executor.launcher(sizes)
        places = {name: k for k, name in enumerate((*launcher.names, *launcher.prepared))}
        inputs = []
        for position, entry in enumerate(plan.inputs):
            if entry.buffer is not None:
                layout = plan.buffers[entry.buffer]
                _, strides, _ = view_at(layout, sizes)
                inputs.append(_Input(position, places[entry.buffer], layout.dtype, strides))
        new = [(p.nbytes, tuple(places[name] for name in p.names)) for p in launcher.places]
        taken: set[str] = set()

        def output(found: PlanOutput) -> _Output:
            name = found.buffer
            if name is None:
                return _Output(
                    found.constant if found.size is None else evaluate(found.size, sizes)
                )
            buffer = plan.buffers[name]
            is_own = buffer.role == "output" or (
                found.mutates is not None and plan.inputs[found.mutates].buffer == name
            )
            shared = not is_own or (name in taken and found.mutates is not None)
            taken.add(name)
            return _Output(
                place=places.get(name),
                memory=launcher.constants.get(name),
                layout=(buffer.dtype, *view_at(found, sizes)),
                nbytes=buffer.nbytes_for(sizes) if shared else 0,
            )

        outputs = tuple(map(output, plan.outputs))
        return _Resolved(launcher, tuple(inputs), tuple(new), outputs)
