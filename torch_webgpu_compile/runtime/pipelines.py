"""Pipelines: one per WGSL text and device, compiled once and kept while it is of use."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
        self._asked = 0  # by `compile_many`s under way, and done of them
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
            self._asked += len(missing)
        done = 0

        def compile_one(kernel: Kernel) -> Pipeline:
            nonlocal done
            pipeline = self.compile(kernel)
            with self._lock:
                self._done += 1
                done += 1
            return pipeline

        try:
            threads = min(self._threads, len(missing))
            with Stage("wait"):
                if threads > 1:
                    with ThreadPoolExecutor(threads) as executor:
                        pipelines = list(executor.map(compile_one, missing.values()))
                else:
                    pipelines = [compile_one(kernel) for kernel in missing.values()]
            compiled = dict(zip(missing, pipelines, strict=True))
            return [compiled.get(_key(kernel)) or self.compile(kernel) for kernel in kernels]
        finally:
            with self._lock:
                self._asked -= len(missing)
                self._done -= done

    @property
    def progress(self) -> tuple[int, int]:
        """Kernels done and kernels to do of the `compile_many`s that are under way."""
        with self._lock:
            return self._done, self._asked


def _key(kernel: Kernel) -> _PipelineKey:
    writable = tuple(binding.writable for binding in kernel.bindings)
    return kernel.wgsl, writable, kernel.parameter_count > 0
