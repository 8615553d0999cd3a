"""Says on a terminal that a compilation is under way when it takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

DELAY_SECONDS = 2.0
"""A compilation that is done by then says nothing."""

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
            yield
        finally:
            line.done.set()
            thread.join()
    finally:
        _showing.release()


class _Line:
    """One line that is written again and again; without a terminal, several."""

    def __init__(self, what: str, counts: Counts, stream: TextIO, is_terminal: bool) -> None:
        self._what = what
        self._counts = counts
        self._stream = stream
        self._is_terminal = is_terminal
        self._start = time.monotonic()
        self._shown = ""
        self.done = threading.Event()

    def run(self) -> None:
        if self.done.wait(DELAY_SECONDS):
            return
        while True:
            done, known = self._counts()
            self._write(
                f"compiling {self._what}" + (f": {done} of {known} kernels" if known else "")
            )
            if self.done.wait(_PERIOD_SECONDS):
                break
        self._write(f"compiled {self._what} in {time.monotonic() - self._start:.1f} s")
        if self._is_terminal:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, text: str) -> None:
        text, before = f"torch_webgpu_compile: {text}", len(self._shown)
        if text == self._shown:
            return
        self._shown = text
        self._stream.write(f"\r{text:{before}}" if self._is_terminal else f"{text}\n")
        self._stream.flush()
