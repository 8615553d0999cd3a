"""Pipelines: one per WGSL text and device, compiled once and kept while it is of use."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ..counters import counters
from ..plan.lru_cache import LruCache
from ..plan.model import USER_KERNEL, Kernel
from ..stages import Stage
from .interface import Handle
from .native import NativeBackend


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Pipeline:
    """A compiled kernel. The GPU's object is released with the last reference to its handle."""

    handle: Handle
    layout: Handle


_PipelineKey = tuple[str, tuple[bool, ...], bool]

# Compilers run in the threads that ask, and share little: the 58 kernels of a Swin-T take one
# thread of an H200's host 10.4 s on Dawn and 9.0 on wgpu-native, 8 of them 1.60 and 1.37, 16 of
# them 0.94 and 0.82. Dawn's asynchronous call has two threads of its own: 4.26 s.
_MOST_THREADS = 16


class PipelineCache:
    """Compiles kernels. Equal kernels are compiled once, whatever their names.

    A pipeline lives as long as an executor has it. The most recent ones stay a while longer: a
    graph that is compiled anew often has kernels of the one before.

    Args:
        backend: what creates them.
        checked: whether shaders check bounds themselves; those of users always do.
        threads: how many compile at once.
        recent: how many pipelines stay that nobody has.
    """

    def __init__(
        self, backend: NativeBackend, checked: bool, threads: int | None = None, recent: int = 256
    ) -> None:
        self._backend = backend
        self._checked = checked
        self._threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._pipelines: weakref.WeakValueDictionary[_PipelineKey, Pipeline] = (
            weakref.WeakValueDictionary()
        )
        self._recent = LruCache[_PipelineKey, Pipeline](recent)
        self._turns: dict[_PipelineKey, threading.Lock] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._asked = 0  # of the threads, which have done so many
        self._done = 0

    def compile(self, kernel: Kernel) -> Pipeline:
        """The pipeline of a kernel. Raises ShaderError, also again for the same kernel."""
        key = _key(kernel)
        with self._lock:
            pipeline = self._pipelines.get(key)
            if pipeline is not None:
                self._recent.keep(key, pipeline)
                return pipeline
            turn = self._turns.setdefault(key, threading.Lock())
        # Whoever comes later waits, and finds it; or tries too, if the first one failed: a later
        # attempt may succeed, e.g. after memory was freed.
        with turn:
            pipeline = self._pipelines.get(key)
            if pipeline is None:
                checked = self._checked or kernel.kind == USER_KERNEL
                with Stage("pipeline", kernel.name):
                    pipeline = Pipeline(*self._backend.create_pipeline(kernel, checked))
                with self._lock:
                    self._pipelines[key] = pipeline
                counters.add(kernels_compiled=1)
        with self._lock:
            self._turns.pop(key, None)
            self._recent.keep(key, pipeline)
        return pipeline

    def compile_many(self, kernels: Sequence[Kernel]) -> list[Pipeline]:
        """`compile` for each kernel, in parallel: the compiler runs without the GIL."""
        with self._lock:
            missing = {key: k for k in kernels if (key := _key(k)) not in self._pipelines}
        if not missing:
            return [self.compile(kernel) for kernel in kernels]
        with Stage("wait"):
            if len(missing) == 1:  # a thread takes longer to wake than most calls may last
                return [self.compile(kernel) for kernel in kernels]
            started = [self._start(kernel) for kernel in missing.values()]
            try:
                compiled = {key: f.result() for key, f in zip(missing, started, strict=True)}
            except BaseException:
                _cancel(started)
                raise
        return [compiled.get(_key(kernel)) or self.compile(kernel) for kernel in kernels]

    @contextmanager
    def ahead(self) -> Iterator[Callable[[Kernel], None]]:
        """A function that begins to compile a kernel, whose pipeline is kept within the block.

        What asks for that pipeline waits for it, and is told of errors. After an exception in the
        block, those do not begin that have not begun.
        """
        started: dict[_PipelineKey, Future[Pipeline]] = {}

        def start(kernel: Kernel) -> None:
            if (key := _key(kernel)) not in started:
                started[key] = self._start(kernel)

        try:
            yield start
        except BaseException:
            _cancel(started.values())
            raise

    def _start(self, kernel: Kernel) -> Future[Pipeline]:
        """`compile` in a thread. These take what they are given in order."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "webgpu-pipelines")
            self._asked += 1
        future = self._pool.submit(self.compile, kernel)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[Pipeline]) -> None:
        with self._lock:
            self._done += 1
            if self._done == self._asked:
                self._done = self._asked = 0

    @property
    def progress(self) -> tuple[int, int]:
        """Kernels done and kernels to do, of those that threads are busy with."""
        with self._lock:
            return self._done, self._asked


def _cancel(started: Iterable[Future[Pipeline]]) -> None:
    for future in started:
        future.cancel()


def _key(kernel: Kernel) -> _PipelineKey:
    writable = tuple(binding.writable for binding in kernel.bindings)
    return kernel.wgsl, writable, kernel.parameter_count > 0
