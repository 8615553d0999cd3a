"""A pool of buffers that records who allocated what: while it does, every allocation is slower."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import OutOfMemoryError
from .buffers import Allocation, BufferPool
from .interface import Handle

Frame = tuple[str, int, str]
"""File, line and function of a line of Python."""


@dataclass(frozen=True, slots=True)
class AllocationEvent:
    """An allocation, a release or a failure of memory.

    Attributes:
        action: ``alloc``, ``free_requested`` and ``free_completed`` of a loan, ``segment_alloc``
            and ``segment_free`` of a buffer of the GPU, ``oom``: the words of ``torch.cuda``.
        serial: of the memory; 0 of an ``oom``.
        nbytes: how much.
        frames: where, the innermost first.
        microseconds: when, since 1970.
    """

    action: str
    serial: int
    nbytes: int
    frames: tuple[Frame, ...]
    microseconds: int


@dataclass
class History:
    """The events that a pool records.

    Attributes:
        stacks: of which actions the frames are kept: ``state``, ``alloc`` and ``all``, as in
            ``torch.cuda.memory._record_memory_history``, or None.
        events: what happened, the latest last; none where only the present is of interest.
        skipped: actions that are not recorded.
        present: the frames of the memory that is lent, by its serial.
    """

    stacks: str | None
    events: deque[AllocationEvent]
    skipped: frozenset[str] = frozenset()
    present: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def add(self, action: str, serial: int, nbytes: int, *, frees: bool = False) -> None:
        """Records an event at the calling line."""
        is_kept = self.stacks == "all" or (self.stacks is not None and not frees)
        frames = _frames() if is_kept else ()
        if action == "alloc":
            self.present[serial] = frames
            if self.stacks == "state":
                frames = ()
        elif action == "free_completed":
            self.present.pop(serial, None)
        if self.events.maxlen != 0 and action not in self.skipped:
            self.events.append(
                AllocationEvent(action, serial, nbytes, frames, time.time_ns() // 1000)
            )


def _frames() -> tuple[Frame, ...]:
    """The stack, from the code that called this package inwards on."""
    own = __name__.partition(".")[0]
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == own:
        frame = frame.f_back
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(found)


class RecordingPool(BufferPool):
    """A `BufferPool` that records: `record` sets this class on an object.

    A loan that ends is noticed when the pool is next asked for something.
    """

    history: History

    def _lend(self, buffer: Any, loan: Any, allocation: Allocation, *free: Any) -> None:
        super()._lend(buffer, loan, allocation, *free)
        self.history.add("alloc", allocation.serial, allocation.capacity)

    def _create(self, capacity: int, usage: int) -> Allocation:
        allocation = super()._create(capacity, usage)
        self.history.add("segment_alloc", allocation.serial, capacity)
        return allocation

    def create(self, nbytes: int, usage: int) -> Handle:
        """Like `BufferPool.create`, and records it."""
        try:
            return super().create(nbytes, usage)
        except OutOfMemoryError:
            self.history.add("oom", 0, nbytes)
            raise

    def _sort_in(self) -> None:
        before = {allocation.serial: allocation for allocation in self._ending()}
        super()._sort_in()
        for serial, allocation in before.items():
            for action in ("free_requested", "free_completed"):
                self.history.add(action, serial, allocation.capacity, frees=True)

    def _ending(self) -> list[Allocation]:
        found = []
        for loan in list(self.returned):
            with suppress(TypeError):  # of one that was dropped before it was lent
                found.append(self._lent[loan])
        return found

    def _release(self, allocations: Sequence[Allocation]) -> None:
        super()._release(allocations)
        for allocation in allocations:
            self.history.add("segment_free", allocation.serial, allocation.capacity, frees=True)


def record(pool: BufferPool, history: History | None) -> None:
    """Starts recording into a history, or ends it."""
    if history is not None:
        pool.history = history  # type: ignore[attr-defined]
        pool.__class__ = RecordingPool
    else:
        pool.__class__ = BufferPool


def history_of(pool: BufferPool) -> History | None:
    """The history that a pool records, if it does."""
    return pool.history if isinstance(pool, RecordingPool) else None
