"""`CommandQueue`: gathers recorded commands and submits them together.

A submit costs tens of microseconds whatever it holds, an eager operator is one small dispatch: so
commands wait until there are enough of them, or until something needs them on the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain

from ..errors import DeviceLostError
from .interface import Backend, Command, DispatchRun

MAX_PENDING = 32
"""Dispatches that wait at most: they share one submit, and the GPU soon has work. A plan with as
many is submitted at once, so that the GPU starts while the host prepares the results."""


class Recording:
    """Commands that were recorded together. Make it once, record it often.

    Args:
        commands: not changed while they are pending.
            Their bind groups live as long as they, and the pool frees no buffer before it has
            flushed: nothing else has to be kept.
        name: of the plan or operator, for error messages.
    """

    __slots__ = ("commands", "dispatch_count", "name")

    def __init__(self, commands: Sequence[Command], name: str) -> None:
        self.commands = commands
        self.name = name
        count = 0
        for command in commands:
            if isinstance(command, DispatchRun):
                count += len(command.items)
        self.dispatch_count = count


class CommandQueue:
    """The order of all commands of one device. Safe to call from several threads.

    Commands run in the order in which they were recorded or submitted. Whatever goes past this
    queue (`Backend.write_buffer`) comes before what is pending: `flush` first.

    An error of a recorded command is raised by the call that submits it: a later `record`, `flush`,
    `submit` or `wait`, in any thread. It names the plan or operator at fault. All other pending
    commands are run, as they may be of callers that have nothing to do with it.

    Attributes:
        batch: counts the batches submitted. A buffer given back during batch n is not used by
            pending commands any more once this is greater than n.
        dispatches: dispatches recorded so far.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Reentrant: a finaliser that records something may run in the middle of any method here.
        self._lock = threading.RLock()
        self._pending: list[Recording] = []
        self._pending_dispatches = 0
        self._sending = False
        self.batch = 0
        self.dispatches = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is pending."""
        return not self._pending and not self._sending

    def record(self, recording: Recording) -> None:
        """Adds commands; submits everything once `MAX_PENDING` dispatches have gathered.

        Raises:
            DeviceError: pending commands were refused. These commands are recorded all the same.
        """
        with self._lock:
            self._pending.append(recording)
            self.dispatches += recording.dispatch_count
            self._pending_dispatches += recording.dispatch_count
            if self._pending_dispatches >= MAX_PENDING and not self._sending:
                self._send()

    def flush(self) -> int | None:
        """Submits what is pending, without waiting; its number for `Backend.wait`, None if nothing.

        Raises:
            DeviceError: commands were refused.
        """
        with self._lock:
            return self._send() if self._pending else None

    def submit(self, commands: Sequence[Command], name: str) -> int:
        """Submits what is pending and then these commands, in one submit if the GPU takes them.

        Raises:
            DeviceError: commands were refused.
        """
        with self._lock:
            self._pending.append(Recording(commands, name))
            return self._send()

    def wait(self) -> None:
        """Submits what is pending and waits until the GPU has done everything."""
        self.flush()
        self._backend.wait()

    def _send(self) -> int:
        self._sending = True
        pending, self._pending = self._pending, []
        dispatches, self._pending_dispatches = self._pending_dispatches, 0
        before = self._backend.submissions
        try:
            return self._submit(pending)
        except BaseException as error:
            if not isinstance(error, Exception) and self._backend.submissions == before:
                # Ctrl-C: neither lose commands nor run them twice
                self._pending = pending + self._pending
                self._pending_dispatches += dispatches
                self.batch -= 1
            raise
        finally:
            self._sending = False
            self.batch += 1

    def _submit(self, recordings: list[Recording]) -> int:
        last = recordings[-1]
        if len(recordings) == 1:
            return self._backend.submit(last.commands, last.name)
        try:
            commands = chain.from_iterable([recording.commands for recording in recordings])
            return self._backend.submit(list(commands), "recorded commands")
        except DeviceLostError:
            raise
        except Exception:
            return self._submit_singly(recordings)

    def _submit_singly(self, recordings: list[Recording]) -> int:
        """Runs the valid ones; raises the error of the first that is not."""
        failure: Exception | None = None
        submission = 0
        for recording in recordings:
            try:
                submission = self._backend.submit(recording.commands, recording.name)
            except DeviceLostError:
                raise
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return submission
