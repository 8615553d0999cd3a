"""Counts of what this package did in the process: ``torch_webgpu_compile.counters``."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Process-wide counts; read the attributes, `reset` sets all to zero.

    Attributes:
        kernels_compiled: compute pipelines built.
        plans_compiled: graphs compiled into plans.
        plan_cache_hits: those of them whose plan was found in a cache.
        dispatches: compute dispatches submitted.
        fallbacks: calls of each ATen overload that ran on the host.
        bytes_uploaded: bytes copied from CPU tensors to GPU buffers.
        bytes_downloaded: bytes copied from GPU buffers to CPU tensors.
    """

    kernels_compiled: int
    plans_compiled: int
    plan_cache_hits: int
    dispatches: int
    bytes_uploaded: int
    bytes_downloaded: int
    _NUMBERS = tuple(__annotations__)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Sets every count to zero."""
        with self._lock:
            for name in self._NUMBERS:
                setattr(self, name, 0)
            self.fallbacks: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Adds to several counts, by their names, at once, safely from any thread."""
        with self._lock:
            for name, number in numbers.items():
                setattr(self, name, getattr(self, name) + number)

    def add_call(self, dispatches: int, bytes_uploaded: int, bytes_downloaded: int) -> None:
        """Adds one call of a compiled graph. Cheaper than `add`: it is on every call's path."""
        with self._lock:
            self.dispatches += dispatches
            self.bytes_uploaded += bytes_uploaded
            self.bytes_downloaded += bytes_downloaded

    def add_fallback(self, op: str) -> None:
        """Counts a call of an ATen overload that ran on the host."""
        with self._lock:
            self.fallbacks[op] += 1

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={getattr(self, name)}" for name in self._NUMBERS)
        return f"Counters({numbers}, fallbacks={dict(self.fallbacks)})"


counters = Counters()
