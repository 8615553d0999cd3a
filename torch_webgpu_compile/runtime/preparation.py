"""`Preparation`: the buffers that a plan computes from some of its inputs once for many calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..counters import counters
from ..errors import DeviceError
from .buffers import AnyBuffer, GpuBuffer, Serial

if TYPE_CHECKING:
    from .executor import Executor
    from .launcher import Launcher

_version_of = attrgetter("version")


@dataclass(frozen=True, slots=True)
class _Results:
    """What was computed.

    Attributes:
        place: the memory that it was computed from.
        buffers: the results.
        references: to the buffers that it was computed from.
    """

    place: tuple[Serial, ...]
    buffers: tuple[GpuBuffer, ...]
    references: tuple[weakref.ref[GpuBuffer], ...]


class Preparation:
    """Runs `Plan.preparation` when what it reads has changed. Safe to call from several threads.

    Results are kept for every set of inputs that it meets, as for layers that share their code,
    while the inputs' memory lives. Changes are known by `GpuBuffer.version`: whoever writes into
    memory that has been lent out sets it back.

    Args:
        executor: of the preparation's plan.
        names: the prepared buffers, in the order that a call's results are to have.

    Attributes:
        reads: the plan's inputs, by name, in the order of a call's arguments.
        names: as given.

    Raises:
        DeviceError: the preparation does not compute just these.
    """

    def __init__(self, executor: Executor, names: Sequence[str]) -> None:
        plan = executor.plan
        made = [output.buffer for output in plan.outputs]
        if len(set(names)) != len(made) or set(names) != set(made):
            raise DeviceError(
                f"plan {plan.name} computes {made}, which is not what is needed: {list(names)}; "
                "this is a bug of the planner"
            )
        self._executor = executor
        self._status = executor.device.status
        self._launcher: Launcher | None = None
        self._known: dict[tuple[Serial, ...], _Results] = {}
        self.reads = tuple(entry.buffer for entry in plan.inputs if entry.buffer is not None)
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
        """What results are kept for: equal while they would be computed again alike, and right.

        After an index that was out of range they may be wrong; the next call is told of it again.
        """
        return (self._status.errors, *map(_version_of, inputs))

    def reclaim(self) -> None:
        """Lets go of the results; the next call computes them again (`Device.empty_cache`)."""
        if self._executor.lock.acquire(blocking=False):  # else it is in use: leave it alone
            try:
                self._known.clear()
            finally:
                self._executor.lock.release()

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
            self._known[state] = _Results(place, buffers, references)
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
    known: dict[tuple[Serial, ...], _Results], state: tuple[Serial, ...]
) -> Callable[[Any], None]:
    """What drops results when memory that they were computed from is given back.

    It runs in the middle of anything: no lock, only atomic operations.
    """

    def died(_: Any) -> None:
        known.pop(state, None)

    return died
