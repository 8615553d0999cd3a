"""Says on a terminal what a compilation does, and for how long, when it takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from .stages import Stage, telling

DELAY_SECONDS = 2.0
"""A compilation that is done by then says nothing."""

ESTIMATE_SECONDS = 5.0
"""From then on it also says how long it may still take."""

_PERIOD_SECONDS = 0.5

Counts = Callable[[], tuple[int, int]]
"""Kernels done and kernels to do, as far as they are known."""

_showing = threading.Lock()  # one line at a time: a compilation inside another says nothing


@contextmanager
def shown(what: str, counts: Counts, policy: str = "auto") -> Iterator[None]:
    """Shows how far a compilation has come, from `DELAY_SECONDS` after its start on.

    Args:
        what: is compiled.
        counts: how far it is.
        policy: ``auto``: if stderr is a terminal; ``1``: always; ``0``: never.
    """
    stream = sys.stderr
    is_terminal = stream is not None and stream.isatty()
    if policy == "0" or stream is None or not (is_terminal or policy == "1"):
        yield
        return
    if not _showing.acquire(blocking=False):
        yield
        return
    try:
        line = _Line(what, counts, stream, is_terminal)
        thread = threading.Thread(target=line.run, name="torch-webgpu-progress", daemon=True)
        thread.start()
        try:
            with telling(line.way):
                yield
        finally:
            line.done.set()
            thread.join()
    finally:
        _showing.release()


_PARTS = {"autograd": 1.0, "pass": 0.6, "wait": 0.2}
"""What a compilation consists of, in this order, and how long each part takes beside the others.

Roughly that of a Swin-T and of a GPT-2's training step with an H200.
"""


class Way:
    """A listener that follows the stages of one thread, and estimates what is left of them.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._stages: list[Stage] = []
        self._since = clock()
        self._seconds = dict.fromkeys(_PARTS, 0.0)

    def began(self, stage: Stage) -> None:
        """Counts the seconds until now for the stage around this one."""
        if threading.get_ident() == self._thread:
            self._count()
            self._stages.append(stage)

    def ended(self, stage: Stage) -> None:
        """Counts the seconds until now for this stage."""
        if threading.get_ident() == self._thread and stage in self._stages:
            self._count()
            del self._stages[self._stages.index(stage) :]

    def _count(self) -> None:
        now = self._clock()
        part = self._part
        if part is not None:
            self._seconds[part] += now - self._since
        self._since = now

    @property
    def _part(self) -> str | None:
        return next((s.kind for s in reversed(self._stages) if s.kind in _PARTS), None)

    @property
    def text(self) -> str:
        """The innermost stage; "" where it says nothing to a person."""
        named = {"autograd": "AOTAutograd", "wait": "pipelines"}
        stage = next(iter(self._stages[-1:]), None)
        return "" if stage is None else stage.name or named.get(stage.kind, "")

    def seconds_left(self, done: int, known: int) -> float | None:
        """How long it may still take, when so many of the kernels that are known are compiled.

        Parts that are behind it tell how long those ahead take, and kernels how long others do.
        None before the first part.
        """
        part = self._part
        if part is None:
            return None
        seconds = dict(self._seconds)
        here = seconds[part] = seconds[part] + self._clock() - self._since
        names = [*_PARTS]
        at = names.index(part)
        before = [name for name in names[:at] if seconds[name] > 0]
        if before:
            unit = sum(seconds[name] for name in before) / sum(_PARTS[name] for name in before)
            left = max(unit * _PARTS[part] - here, here / 4)
        else:
            left = here / 2  # neither its beginning nor its size is known
            unit = (here + left) / _PARTS[part]
        if part == "wait" and done:
            left = here / done * (known - done)
        return left + unit * sum(_PARTS[name] for name in names[at + 1 :])


class _Line:
    """One line that is written again and again; without a terminal, several."""

    def __init__(self, what: str, counts: Counts, stream: TextIO, is_terminal: bool) -> None:
        self._what = what
        self._counts = counts
        self._stream = stream
        self._is_terminal = is_terminal
        self._start = time.monotonic()
        self._shown = ""
        self.way = Way()
        self.done = threading.Event()

    def run(self) -> None:
        if self.done.wait(DELAY_SECONDS):
            return
        while True:
            self._write(", ".join([f"compiling {self._what}", *self._state()]))
            if self.done.wait(_PERIOD_SECONDS):
                break
        self._write(f"compiled {self._what} in {time.monotonic() - self._start:.1f} s")
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _state(self) -> Iterator[str]:
        done, known = self._counts()
        if stage := self.way.text:
            yield stage
        if known:
            yield f"{done} of {known} kernels"
        if time.monotonic() - self._start >= ESTIMATE_SECONDS:
            left = self.way.seconds_left(done, known)
            if left is not None:
                yield f"about {max(1, round(left))} s more"

    def _write(self, text: str) -> None:
        text, before = f"torch_webgpu_compile: {text}", len(self._shown)
        if text == self._shown:
            return
        self._shown = text
        self._stream.write(f"\r{text:{before}}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
