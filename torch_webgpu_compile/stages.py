"""Stages of a first call: how long each takes, for those who want to know.

    with Stage("pass", "fuse") as stage: ...
    stage.seconds

The kinds are ``dynamo``, ``autograd`` (AOTAutograd), ``pass``, ``pipeline`` (a kernel's), ``wait``
(for pipelines), ``device`` (opening the GPU), ``executor`` (making one) and ``backend`` (around
all but Dynamo).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

clock: Callable[[], float] = perf_counter
"""Gives the seconds that stages are timed by."""


class Stage:
    """A context in which something is done.

    Attributes:
        kind, name: what.
        seconds: how long it took, once it has ended.
        own_seconds: without the stages within it, in the same thread.
    """

    __slots__ = ("_outer", "_start", "kind", "name", "own_seconds", "seconds")

    def __init__(self, kind: str, name: str = "") -> None:
        self.kind, self.name = kind, name
        self.seconds = self.own_seconds = 0.0

    def __enter__(self) -> Stage:
        self._outer: Stage | None = getattr(_thread, "stage", None)
        _thread.stage = self
        for listener in _listeners:
            listener.began(self)
        self._start = clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = clock() - self._start
        self.own_seconds += self.seconds
        _thread.stage = self._outer
        if self._outer is not None:
            self._outer.own_seconds -= self.seconds
        for listener in _listeners:
            listener.ended(self)


class Listener(Protocol):
    """Told of stages, in the threads that they are in."""

    def began(self, stage: Stage) -> None:
        """A stage begins."""

    def ended(self, stage: Stage) -> None:
        """A stage has ended, also by an exception."""


_thread = threading.local()
_listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()


@contextmanager
def telling(listener: Listener) -> Iterator[None]:
    """The listener is told of the stages of all threads meanwhile."""
    global _listeners
    with _changing:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _changing:
            _listeners = tuple(other for other in _listeners if other is not listener)


class Sums:
    """A listener that adds seconds up, over threads, by the kind and the name of stages.

    Attributes:
        seconds, own_seconds: as those of `Stage`.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.own_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._lock = threading.Lock()

    def began(self, stage: Stage) -> None:
        """Nothing is known yet."""

    def ended(self, stage: Stage) -> None:
        """Adds a stage."""
        key = stage.kind, stage.name
        with self._lock:
            self.seconds[key] += stage.seconds
            self.own_seconds[key] += stage.own_seconds

    def own(self, kind: str) -> dict[str, float]:
        """The own seconds of the stages of a kind by their names, the longest first."""
        found = [(name, s) for (of, name), s in self.own_seconds.items() if of == kind]
        return dict(sorted(found, key=lambda entry: -entry[1]))
