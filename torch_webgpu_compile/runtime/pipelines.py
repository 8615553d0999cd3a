"""Pipelines: one per WGSL text and device, compiled once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..plan.model import Kernel
from .interface import Backend, Handle


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A compiled kernel."""

    handle: Handle
    layout: Handle


Key = tuple[str, tuple[bool, ...], bool]


class PipelineCache:
    """Compiles kernels. Equal kernels are compiled once, whatever their names."""

    def __init__(self, backend: Backend, checked: bool, threads: int | None = None) -> None:
        self._backend = backend
        self._checked = checked
        self._threads = threads if threads is not None else min(8, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._pipelines: dict[Key, Future[Pipeline]] = {}
        self.kernels_compiled = 0
        self.compile_seconds = 0.0

    def compile(self, kernel: Kernel) -> Pipeline:
        """The pipeline of a kernel. Raises ShaderError, also again for the same kernel."""
        key = _key(kernel)
        with self._lock:
            future = self._pipelines.get(key)
            mine = future is None
            if future is None:
                future = self._pipelines[key] = Future()
        if not mine:
            return future.result()
        start = time.perf_counter()
        try:
            pipeline = Pipeline(*self._backend.create_pipeline(kernel, self._checked))
        except BaseException as error:
            with self._lock:  # a later attempt may succeed, e.g. after memory was freed
                del self._pipelines[key]
            future.set_exception(error)
            raise
        with self._lock:
            self.kernels_compiled += 1
            self.compile_seconds += time.perf_counter() - start
        future.set_result(pipeline)
        return pipeline

    def compile_many(self, kernels: Sequence[Kernel]) -> list[Pipeline]:
        """`compile` for each kernel, in parallel: the compiler runs without the GIL."""
        with self._lock:
            missing = {key: k for k in kernels if (key := _key(k)) not in self._pipelines}
        threads = min(self._threads, len(missing))
        if threads > 1:
            with ThreadPoolExecutor(threads) as executor:
                list(executor.map(self.compile, missing.values()))
        return [self.compile(kernel) for kernel in kernels]


def _key(kernel: Kernel) -> Key:
    writable = tuple(binding.writable for binding in kernel.bindings)
    return kernel.wgsl, writable, kernel.parameter_count > 0
