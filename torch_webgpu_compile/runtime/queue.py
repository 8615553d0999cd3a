"""`CommandQueue`: gathers recorded commands and submits them together.

A submit costs tens of microseconds whatever it holds, an eager operator is one small dispatch: so
commands wait until there are enough of them, or until something needs them on the GPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from ..errors import DeviceError, DeviceLostError
from ..plan.model import Dispatch, Kernel
from .failures import lost_error
from .interface import Command, DispatchRun, Span
from .native import NativeBackend

MIN_BATCH = 16
"""Dispatches of the first batch after a download or a wait: an idle GPU should start soon."""

MAX_BATCH = 64
"""The size to which batches grow. On an H200, 1,000 tiny operators and a download take 17 ms when
each is submitted alone, 3.2 ms in batches of 16, 2.5 ms of 64, and 4.8 ms in one batch, as the GPU
then waits until the host has encoded them all."""

_BATCH_SECONDS = 0.02
"""Predicted seconds of work that are submitted however few dispatches they are. Predictions are for
the slowest adapters of a kind: an H200 needs 0.3 to 0.6 ms for that, and a submission takes 15 µs
of the host's. Later, the GPU would wait for the host, and in the end the host for the GPU."""


class RecordedDispatch(Protocol):
    """A dispatch for the queue and for profiles: see `sized.SizedDispatch`."""

    @property
    def index(self) -> int:
        """Among the plan's `Dispatch` steps."""

    @property
    def kernel(self) -> Kernel:
        """The kernel of the plan."""

    @property
    def step(self) -> Dispatch:
        """The step of the plan."""

    @property
    def seconds(self) -> float:
        """How long it may take."""

    @property
    def share(self) -> float:
        """The part of the step's workgroups that it has."""


class Recording:
    """Commands that were recorded together. Make it once, record it often.

    Args:
        commands: not to be changed while they are pending. Nothing else has to be kept: their bind
            groups live as long as they do, and the pool flushes before it frees buffers.
        name: of the plan or operator, for error messages.
        steps: what its dispatches are, in order, for profiles.
        sizes: the values of their plan's size symbols.

    Attributes:
        weight: the dispatches; of long ones, as many short ones as take as long.
    """

    __slots__ = ("commands", "name", "sizes", "steps", "weight")

    def __init__(
        self,
        commands: Sequence[Command],
        name: str,
        steps: Sequence[RecordedDispatch] = (),
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.commands = commands
        self.name = name
        self.steps = steps
        self.sizes = sizes or {}
        count = 0
        for command in commands:
            if isinstance(command, DispatchRun):
                count += len(command.items)
        seconds = sum([step.seconds for step in steps])
        self.weight = max(count, math.ceil(MAX_BATCH * seconds / _BATCH_SECONDS))

    def with_commands(self, commands: Sequence[Command]) -> Recording:
        """The same dispatches on other memory."""
        made = Recording.__new__(Recording)
        made.commands = commands
        made.name = self.name
        made.steps = self.steps
        made.sizes = self.sizes
        made.weight = self.weight
        return made


Watcher = Callable[[Recording, list[Span]], None]
"""Is told when each dispatch of a recording ran."""


class CommandQueue:
    """The order of all commands of one device. Safe to call from several threads.

    Commands run in the order in which they were recorded or submitted. Whatever goes past this
    queue (`NativeBackend.write_buffer`) comes before what is pending: `flush` first.

    An error of a recorded command is raised by the call that submits it: a later `record`, `flush`,
    `submit` or `wait`, in any thread. It names the plan or operator at fault. All other pending
    commands are run, as they may be of callers that have nothing to do with it.

    Attributes:
        batch: the number of the batch that is being gathered.
        sent: the batches before this one have been submitted. A buffer that was given back while
            batch n was gathered is not used by pending commands once this is greater than n.
    """

    def __init__(self, backend: NativeBackend) -> None:
        self._backend = backend
        # Reentrant: a finaliser that records something may run in the middle of any method here.
        self._lock = threading.RLock()
        self._pending: list[Recording] = []
        self._pending_weight = 0
        self._limit = MIN_BATCH
        self._sending = False
        self._watcher: Watcher | None = None
        self.batch = 0
        self.sent = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending and self.sent == self.batch

    @property
    def is_watched(self) -> bool:
        """Whether anything observes when dispatches run."""
        return self._watcher is not None

    def record(self, recording: Recording) -> None:
        """Adds commands; submits everything once enough dispatches have gathered.

        Raises:
            DeviceError: pending commands were refused. These commands are recorded all the same.
            DeviceLostError: the device is lost. They are not.
        """
        with self._lock:
            if self._backend.lost_cause:
                raise lost_error(f"running {recording.name}", self._backend.lost_cause)
            if self._watcher is not None and not self._sending:
                self._run_watched(recording, self._watcher)
                return
            # Without a call, so that Ctrl-C cannot come in between.
            self._pending += (recording,)
            self._pending_weight += recording.weight
            if self._pending_weight >= self._limit and not self._sending:
                self._limit = min(2 * self._limit, MAX_BATCH)
                self._send()

    def flush(self) -> int | None:
        """Submits pending commands, without waiting; a number for `NativeBackend.map`, or None.

        Raises:
            DeviceError: commands were refused.
        """
        with self._lock:
            self._check_not_sending()
            return self._send() if self._pending else None

    def submit(self, commands: Sequence[Command], name: str) -> int:
        """Submits pending commands and then these, in one submit if the GPU takes them.

        Raises:
            DeviceError: commands were refused.
        """
        with self._lock:
            self._check_not_sending()
            self._limit = MIN_BATCH
            return self._send(Recording(commands, name))

    def abandon(self) -> None:
        """Drops pending commands: the device is lost."""
        with self._lock:
            self._pending = []
            self._pending_weight = 0

    def watch(self, watcher: Watcher | None) -> None:
        """From now on runs dispatches one at a time and tells ``watcher`` when; None: as before."""
        with self._lock:
            self.flush()
            self._watcher = watcher

    def _run_watched(self, recording: Recording, watcher: Watcher) -> None:
        if self._pending:
            self._send()
        spans: list[Span] = []
        for command in recording.commands:
            if isinstance(command, DispatchRun):
                found = self._backend.submit_timed(command, recording.name)
                spans += found or _time_on_host(self._backend, command, recording.name)
            else:
                self._backend.submit([command], recording.name)
        watcher(recording, spans)

    def wait(self) -> None:
        """Submits pending commands and waits until the GPU has done everything."""
        self.flush()
        self._limit = MIN_BATCH
        self._backend.wait()

    def _check_not_sending(self) -> None:
        """A finaliser may record, but it cannot wait for the commands that it interrupted."""
        if self._sending:
            raise DeviceError(
                "a finaliser or signal handler moved data to or from the GPU while commands were "
                "being submitted; let it set a flag, and move the data later"
            )

    def _send(self, last: Recording | None = None) -> int:
        """Submits pending commands, and then ``last``.

        Ctrl-C neither loses pending commands nor runs them twice. ``last`` is not kept: its caller
        is told, and may let go of what it uses.
        """
        self._sending = True
        self.batch += 1
        unsent, self._pending = self._pending, []
        self._pending_weight = 0
        if last is not None:
            unsent += (last,)
        sent = self.batch
        try:
            return self._submit(unsent)
        except Exception:
            raise
        except BaseException:
            sent = self.sent
            if unsent and unsent[-1] is last:
                del unsent[-1]
            self._pending = unsent + self._pending
            for recording in unsent:
                self._pending_weight += recording.weight
            raise
        finally:
            self.sent = sent
            self._sending = False

    def _submit(self, unsent: list[Recording]) -> int:
        """Submits recordings. If Ctrl-C ends it, those are left that have not been submitted."""
        if len(unsent) == 1:
            return self._submit_singly(unsent)
        before = self._backend.submissions
        try:
            commands = chain.from_iterable([recording.commands for recording in unsent])
            return self._backend.submit(list(commands), "recorded commands")
        except DeviceLostError:
            raise
        except Exception:
            return self._submit_singly(unsent)
        except BaseException:
            if self._backend.submissions != before:
                del unsent[:]
            raise

    def _submit_singly(self, unsent: list[Recording]) -> int:
        """Runs the valid ones; raises the error of the first that is not."""
        failure: Exception | None = None
        submission = 0
        while unsent:
            recording = unsent[0]
            before = self._backend.submissions
            try:
                submission = self._backend.submit(recording.commands, recording.name)
            except DeviceLostError:
                raise
            except Exception as error:
                failure = failure or error
            except BaseException:
                if self._backend.submissions != before:
                    del unsent[0]
                raise
            del unsent[0]
        if failure is not None:
            raise failure
        return submission


def _time_on_host(backend: NativeBackend, run: DispatchRun, name: str) -> list[Span]:
    """`NativeBackend.submit_timed` by the host's clock, for devices without timestamp queries."""
    spans = []
    current = None
    for pipeline, group, x, y, z in run.items:
        current = pipeline if pipeline is not None else current
        backend.wait()
        start = time.perf_counter()
        backend.submit([DispatchRun([(current, group, x, y, z)])], name)
        backend.wait()
        spans.append((start, time.perf_counter()))
    return spans
