"""`Launcher`: a plan at fixed sizes on the caller's memory, for calls of a few microseconds.

`Preparation`: the buffers that a plan computes from some of its inputs once for many calls.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ..counters import counters
from ..errors import DeviceError, SharedMemoryError
from ..plan.model import HostStep, Plan
from .buffers import AnyBuffer, GpuBuffer, Serial
from .device import Device, unless_held
from .interface import Handle
from .program import Segment, Users, build_segments, rebind, users_of
from .sized import MemoryPlace, SizedDispatch, SizedPlan
from .status import Reports

_serial_of, _version_of = attrgetter("serial"), attrgetter("version")

_MANY = 4  # dispatches from which on it pays to make only those anew that bind other memory


RunHostStep = Callable[
    [HostStep, Mapping[str, AnyBuffer], Sequence[Any], dict[str, int]], Sequence[Any]
]
"""(step, memory of plan buffers by name, contents of what it reads, sizes) → those of its outputs.

Contents are uint8 arrays. A step ``on_device`` has none: it writes to the memory.
"""


class PlanExecutor(Protocol):
    """The part of an `Executor` that launchers need; it explains each member."""

    @property
    def plan(self) -> Plan: ...
    @property
    def device(self) -> Device: ...
    @property
    def lock(self) -> threading.RLock: ...
    @property
    def changed(self) -> tuple[str, ...]: ...
    @property
    def checks_indices(self) -> bool: ...
    @property
    def preparation(self) -> Preparation | None: ...
    @property
    def most_bindings(self) -> int: ...
    @property
    def groups(self) -> MutableMapping[tuple[Serial, ...], Handle]: ...
    def launcher(self) -> Launcher: ...
    @property
    def host_call(self) -> RunHostStep | None: ...


class Launcher:
    """Use `Executor.launcher`. Safe to call from several threads, unless the plan has host steps.

        launcher = executor.launcher(sizes)
        memory = dict(inputs)
        for place in launcher.places:
            memory |= dict.fromkeys(place.names, device.allocate(place.nbytes))
        launcher([memory[name] for name in launcher.names])

    All buffers but the outputs may be dropped right after the call: whoever gets the memory next
    uses it later in the queue.

    Attributes:
        names: the plan buffers that a call gives memory for: all but prepared ones and constants.
        nbytes: what the memory of each has to hold.
        sized: the plan at its sizes.
        places: which of them are outputs and intermediates, and the memory that those need.
        prepared: the buffers that `Preparation` gives memory for.
        constants: the plan's own buffers by name.
        dispatch_count: dispatches per call.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_executor",
        "_known",
        "_only_records",
        "_preparation",
        "_record",
        "_static",
        "_status",
        "_users",
        "constants",
        "dispatch_count",
        "names",
        "nbytes",
        "prepared",
        "sized",
    )

    def __init__(
        self,
        executor: PlanExecutor,
        sized: SizedPlan,
        constants: Sequence[GpuBuffer],
    ) -> None:
        self._executor = executor
        self.sized = sized
        self._record = executor.device.queue.record
        self._known: dict[tuple[Serial, ...], Sequence[Segment]] = {}
        self._users: Users | None = None
        self._status = executor.device.status if executor.checks_indices else None
        end = len(sized.names) - (self._status is not None)  # the last one is its
        count = end - len(constants)
        self.constants = dict(zip(sized.names[count:end], constants, strict=True))
        preparation = executor.preparation
        if preparation is not None and not set(preparation.names) <= set(sized.names):
            preparation = None  # a section that reads nothing of it
        self._preparation = preparation
        self._static: tuple[int, ...] = ()
        if preparation is not None:
            self._static = tuple(map(sized.names.index, preparation.reads))
            count -= len(preparation.names)
        self.prepared = () if preparation is None else preparation.names
        self.names, self.nbytes = sized.names[:count], sized.nbytes[:count]
        self._changed = tuple(map(self.names.index, executor.changed))
        self._only_records = not (
            self._status is not None
            or self._changed
            or any(isinstance(step, HostStep) for step in sized.steps)
        )
        self.dispatch_count = sum(isinstance(step, SizedDispatch) for step in sized.steps)
        executor.device.add_reclaimable(self)

    def reclaim(self) -> None:
        """Drops the bind groups, which keep memory from being freed (`Device.empty_cache`)."""
        unless_held(self._executor.lock, self._known.clear)

    @property
    def places(self) -> tuple[MemoryPlace, ...]:
        """See the class."""
        return self.sized.places

    def __call__(self, buffers: Sequence[AnyBuffer]) -> None:
        """Records the plan on memory for ``names``. Waits only for host steps.

        Raises:
            DeviceError: a buffer is too small, or bound for reading and for writing by one kernel;
                or pending commands were refused.
            SharedMemoryError: an argument that the plan changes in place shares memory with another
                one.
        """
        preparation = self._preparation
        if preparation is not None:
            buffers = [*buffers, *preparation([buffers[k] for k in self._static])]
        self.run(buffers)

    def run(self, buffers: Sequence[AnyBuffer], may_share: bool = False) -> None:
        """The call with memory for ``prepared`` too, after that for ``names``.

        Args:
            may_share: whether arguments that the plan changes in place may be given twice.
        """
        reports = None if self._status is None else self._status.own()
        segments = self._segments(buffers, reports, may_share)
        if self._only_records:
            for segment in segments:
                self._record(segment)  # type: ignore[arg-type]  # not a host step
            return
        given = [buffers[k] for k in self._changed]
        changed = [b if type(b) is GpuBuffer else b.memory for b in given]  # most of hundreds are
        try:
            self._mark(changed, reports)  # also before, as Ctrl-C may cut the second time short
            for segment in segments:
                if isinstance(segment, HostStep):
                    self._run_host_step(segment, buffers)
                else:
                    self._record(segment)
        finally:
            self._mark(changed, reports)

    def _run_host_step(self, step: HostStep, buffers: Sequence[AnyBuffer]) -> None:
        """Runs a step; downloads what it reads on the host, with one wait, and uploads results."""
        executor, sizes = self._executor, self.sized.sizes
        assert executor.host_call is not None
        memory = self.constants | dict(zip(self.sized.names, buffers, strict=False))
        if step.on_device:
            executor.host_call(step, memory, (), sizes)
            return
        layouts = executor.plan.buffers
        arrays = [np.empty(layouts[name].nbytes_for(sizes), np.uint8) for name in step.reads]
        given = zip(step.reads, arrays, strict=True)
        executor.device.download_many([(memory[n], 0, a.size, a.ctypes.data) for n, a in given])
        made = executor.host_call(step, memory, arrays, sizes)
        for name, data in zip(step.outputs, made, strict=True):
            executor.device.upload(memory[name], data)

    def segments(self, buffers: Sequence[AnyBuffer]) -> Sequence[Segment]:
        """The recordings and host steps of `run`, in order. Raises as `run` does."""
        reports = None if self._status is None else self._status.own()
        return self._segments(buffers, reports, may_share=True)

    def last_memory(self) -> dict[str, Serial]:
        """The memory that buffers had in the last call that had other memory than those before."""
        serials = next(reversed(self._known), ())
        return dict(zip((*self.names, *self.prepared), serials, strict=False))

    def _mark(self, changed: Sequence[GpuBuffer], reports: Reports | None) -> None:
        """Increments the versions of the buffers that recorded commands change."""
        for memory in changed:
            memory.version = 0
        if reports is not None:
            reports.is_pending = True

    def _segments(
        self, buffers: Sequence[AnyBuffer], reports: Reports | None, may_share: bool
    ) -> Sequence[Segment]:
        serials = tuple(map(_serial_of, buffers))
        if reports is not None:
            serials = (*serials, reports.buffer.serial)
        found = self._known.get(serials)
        if found is not None:
            return found
        if not may_share:
            self._check_changed(buffers)
        executor = self._executor
        with executor.lock:
            own = () if reports is None else (reports.buffer,)
            made = self._build([*buffers, *self.constants.values(), *own], serials)
            while len(self._known) >= executor.most_bindings:
                self._known.pop(next(iter(self._known)))  # the oldest: cheaper than the last used
            self._known[serials] = made
        return made

    def _build(self, memory: Sequence[AnyBuffer], serials: tuple[Serial, ...]) -> Sequence[Segment]:
        """Segments on memory for all names; made from the last ones, where little is new."""
        known, last = next(reversed(self._known.items()), ((), ()))
        names, nbytes = self.sized.names, self.sized.nbytes
        if self._users is not None and len(known) == len(serials):
            changed = [k for k, old in enumerate(known) if old != serials[k]]
            if self._status is not None and changed and changed[-1] == len(known) - 1:
                changed[-1] = len(memory) - 1  # its buffer is behind the constants
            self._check_sizes((memory[k], names[k], nbytes[k]) for k in changed)
            return rebind(last, self._users, changed, self.sized, memory, self._executor.groups)
        self._check_sizes(zip(memory, names, nbytes, strict=True))
        # A plan of one step has nothing to share: its programs tell its bind groups apart.
        groups = self._executor.groups if len(self.sized.steps) > 1 else {}
        made = build_segments(self._executor.plan.name, self.sized, memory, groups)
        if len(self.sized.steps) >= _MANY:
            self._users = users_of(made)
        return made

    def _check_sizes(self, entries: Iterable[tuple[AnyBuffer, str, int]]) -> None:
        for buffer, name, nbytes in entries:
            if buffer.capacity < nbytes:
                raise DeviceError(
                    f"plan {self._executor.plan.name}: buffer {name} needs {nbytes} bytes, the one "
                    f"given has {buffer.nbytes}; check the sizes given to bind()"
                )

    def _check_changed(self, buffers: Sequence[AnyBuffer]) -> None:
        """Raises where a buffer that the call changes is read through another binding."""
        if not self._changed:
            return
        memories = [b.serial if isinstance(b.serial, int) else b.serial[0] for b in buffers]
        loans = Counter(memories)
        for position in self._changed:
            if loans[memories[position]] > 1:
                raise SharedMemoryError(
                    f"plan {self._executor.plan.name} changes {self.names[position]} in place, but "
                    "its memory is also another argument's; give it memory of its own"
                )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The results of a preparation.

    Attributes:
        place: the memory that it was computed from.
        buffers: the results.
        references: to the buffers that it was computed from.
    """

    place: tuple[Serial, ...]
    buffers: tuple[GpuBuffer, ...]
    references: tuple[weakref.ref[GpuBuffer], ...]


class Preparation:
    """Runs `Plan.preparation` when one of its inputs has changed. Safe to call from threads.

    Results are kept for every set of inputs that it meets, as for layers that share their code,
    while the inputs' memory lives. Changes are known by `GpuBuffer.version`: whoever writes into
    memory that has been lent out sets it back.

    Args:
        executor: of the preparation's plan.
        names: the prepared buffers, in the order that a call's results are to have.

    Attributes:
        reads: the plan's inputs, by name, in the order of a call's arguments.
        names: as given.
    """

    def __init__(self, executor: PlanExecutor, names: Sequence[str]) -> None:
        self._executor = executor
        self._status = executor.device.status
        self._launcher: Launcher | None = None
        self._known: dict[tuple[Serial, ...], _Prepared] = {}
        inputs = executor.plan.inputs
        self.reads = tuple(entry.buffer for entry in inputs if entry.buffer is not None)
        self.names = tuple(names)
        executor.device.add_reclaimable(self)
        executor.device.add_holder(self)

    def held(self) -> tuple[str, int]:
        """The results."""
        prepared = tuple(self._known.values())
        return "prepared weights", sum(b.nbytes for entry in prepared for b in entry.buffers)

    def __call__(self, inputs: Sequence[AnyBuffer]) -> tuple[GpuBuffer, ...]:
        """The prepared buffers for the inputs as they are now.

        Raises:
            DeviceError: as `Launcher`.
            OutOfMemoryError: the buffers do not fit.
        """
        known = self._known.get(self._state(inputs))
        return self._prepare(inputs) if known is None else known.buffers

    def _state(self, inputs: Sequence[AnyBuffer]) -> tuple[Serial, ...]:
        """The key that results are kept under: equal while they would be computed alike, and right.

        After an index that was out of range they may be wrong; the next call is told of it again.
        """
        return (self._status.errors, *map(_version_of, inputs))

    def reclaim(self) -> None:
        """Lets go of the results; the next call computes them again (`Device.empty_cache`)."""
        unless_held(self._executor.lock, self._known.clear)

    def _prepare(self, inputs: Sequence[AnyBuffer]) -> tuple[GpuBuffer, ...]:
        with self._executor.lock:
            for buffer in inputs:
                buffer.memory.know_version()
            state = self._state(inputs)
            known = self._known.get(state)
            if known is not None:  # another thread was here first
                return known.buffers
            place = tuple([buffer.serial for buffer in inputs])
            buffers = self._run(inputs, self._take(place))
            died = _dropper(self._known, state)
            references = tuple([weakref.ref(b, died) for b in {b.memory: b for b in inputs}])
            self._known[state] = _Prepared(place, buffers, references)
            return buffers

    def _take(self, place: tuple[Serial, ...]) -> tuple[GpuBuffer, ...] | None:
        """Memory of results that inputs in the same memory had: it is changed, they are void."""
        for state in tuple(self._known):
            prepared = self._known.get(state)
            if prepared is not None and prepared.place == place:
                self._known.pop(state, None)
                return prepared.buffers
        return None

    def _run(
        self, inputs: Sequence[AnyBuffer], buffers: tuple[GpuBuffer, ...] | None
    ) -> tuple[GpuBuffer, ...]:
        executor = self._executor
        if self._launcher is None:
            self._launcher = executor.launcher()
        memory: dict[str, Any] = dict(zip(self.reads, inputs, strict=True))
        if buffers is not None:
            memory |= zip(self.names, buffers, strict=True)
        for place in self._launcher.places:
            if place.key not in memory:
                memory |= dict.fromkeys(place.names, executor.device.allocate(place.nbytes))
        self._launcher([memory[name] for name in self._launcher.names])
        executor.device.queue.flush()  # what is refused is known before anybody relies on it
        counters.add_call(self._launcher.dispatch_count, 0, 0)
        return tuple([memory[name] for name in self.names])


def _dropper(
    known: dict[tuple[Serial, ...], _Prepared], state: tuple[Serial, ...]
) -> Callable[[Any], None]:
    """A callback that drops results when memory that they were computed from is given back.

    It runs in the middle of anything: no lock, only atomic operations.
    """

    def died(_: Any) -> None:
        known.pop(state, None)

    return died
