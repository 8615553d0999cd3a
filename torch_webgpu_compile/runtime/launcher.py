"""`Launcher`: a plan at fixed sizes on the caller's memory, for calls of a few microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import SharedMemoryError
from .buffers import AnyBuffer, GpuBuffer, Serial
from .queue import Recording
from .sized import HostCommand, Place, SizedDispatch, SizedPlan
from .status import Reports

if TYPE_CHECKING:
    from .executor import Executor


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
        places: which of them are outputs and intermediates, and the memory that those need.
        constants: the plan's own buffers by name.
        dispatch_count: dispatches per call.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_constants",
        "_executor",
        "_has_host_steps",
        "_known",
        "_preparation",
        "_record",
        "_sized",
        "_static",
        "_status",
        "constants",
        "dispatch_count",
        "names",
    )

    def __init__(
        self,
        executor: Executor,
        sized: SizedPlan,
        constants: Sequence[GpuBuffer],
    ) -> None:
        self._executor = executor
        self._sized = sized
        self._constants = constants
        self._has_host_steps = any(isinstance(step, HostCommand) for step in sized.steps)
        self._record = executor.device.queue.record
        self._known: dict[tuple[Serial, ...], Sequence[Recording]] = {}
        self._status = executor.device.status if executor.checks_indices else None
        end = len(sized.names) - (self._status is not None)  # the last one is its
        count = end - len(constants)
        self.constants = dict(zip(sized.names[count:end], constants, strict=True))
        preparation = self._preparation = executor.preparation
        self._static: tuple[int, ...] = ()
        if preparation is not None:
            self._static = tuple(map(sized.names.index, preparation.reads))
            count -= len(preparation.names)
        self.names = sized.names[:count]
        self._changed = tuple(map(self.names.index, executor.changed))
        self.dispatch_count = sum(isinstance(step, SizedDispatch) for step in sized.steps)
        executor.device.add_reclaimable(self)

    def reclaim(self) -> None:
        """Drops the bind groups, which keep memory from being freed (`Device.empty_cache`)."""
        if self._executor.lock.acquire(blocking=False):  # else it is in use: leave it alone
            try:
                self._known.clear()
            finally:
                self._executor.lock.release()

    @property
    def places(self) -> tuple[Place, ...]:
        """See the class."""
        return self._sized.places

    def __call__(self, buffers: Sequence[AnyBuffer]) -> None:
        """Records the plan on memory for ``names``.

        Raises:
            DeviceError: a buffer is released, too small, or bound for reading and for writing by
                one kernel; or pending commands were refused.
            SharedMemoryError: an argument that the plan changes in place shares memory with another
                one.
        """
        preparation = self._preparation
        if preparation is not None:
            buffers = [*buffers, *preparation([buffers[k] for k in self._static])]
        serials = tuple([buffer.serial for buffer in buffers])
        reports = None
        if self._status is not None:
            reports = self._status.own()
            serials = (*serials, reports.buffer.serial)
        recordings = self._known.get(serials)
        if recordings is None:
            recordings = self._bind(buffers, serials, reports)
        try:
            self._mark(buffers, reports)  # also before, as Ctrl-C may cut the second time short
            for recording in recordings:
                self._record(recording)
        finally:
            self._mark(buffers, reports)

    def _mark(self, buffers: Sequence[AnyBuffer], reports: Reports | None) -> None:
        """Says what recorded commands change."""
        for k in self._changed:
            buffers[k].memory.version = 0
        if reports is not None:
            reports.is_pending = True

    def _bind(
        self,
        buffers: Sequence[AnyBuffer],
        serials: tuple[Serial, ...],
        reports: Reports | None,
    ) -> Sequence[Recording]:
        """What to record for these buffers; for a plan with host steps nothing, it has run."""
        executor = self._executor
        self._check_changed(buffers)
        if self._has_host_steps:
            externals = dict(zip(self._sized.names, buffers, strict=False))  # without constants
            executor.bind(self._sized.sizes, externals).replay()
            return ()
        with executor.lock:
            own = () if reports is None else (reports.buffer,)
            segments = executor.build(self._sized, [*buffers, *self._constants, *own])
            recordings = [segment for segment in segments if isinstance(segment, Recording)]
            while len(self._known) >= executor.most_bindings:
                self._known.pop(next(iter(self._known)))  # the oldest: cheaper than the last used
            self._known[serials] = recordings
        return recordings

    def _check_changed(self, buffers: Sequence[AnyBuffer]) -> None:
        """What is read through another binding may not change during the call."""
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
