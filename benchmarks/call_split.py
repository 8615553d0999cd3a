"""Where the time of a call goes: PyTorch's compiler, this package's, pipelines, and the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch._dynamo.callback import callback_handler

PYTORCH, OURS, PIPELINES, REST = "pytorch", "compiler", "pipelines", "rest"


@dataclass
class Split:
    """Seconds by part, of the thread that works: the caller's, or autograd's while that waits.

    Attributes:
        seconds: ``pytorch`` Dynamo and AOTAutograd, ``compiler`` what they call of this package,
            ``pipelines`` in which it waits for them; the rest of the call is eager operators, the
            work on the GPU with what a driver compiles only then, and guards.
        in_threads: seconds of each pipeline, in whichever thread compiled it.
        wgsl_nbytes: of their kernels.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    in_threads: list[float] = field(default_factory=list)
    wgsl_nbytes: int = 0
    _parts: list[str] = field(default_factory=lambda: [REST])
    _since: float = field(default_factory=time.perf_counter)

    def enter(self, part: str) -> None:
        """What follows belongs to a part."""
        self._count()
        self._parts.append(part)

    def leave(self) -> None:
        """What follows belongs to the part before again."""
        self._count()
        self._parts.pop()

    def figures(self, first_s: float) -> dict[str, Any]:
        """As results: ``own_s`` is all but PyTorch's part; ``pipelines_in_threads_s`` of compiling
        pipelines is summed over threads.

        Args:
            first_s: of the call.
        """
        from torch_webgpu_compile import counters

        found = {f"{part}_s": self.seconds.get(part, 0.0) for part in (PYTORCH, OURS, PIPELINES)}
        return {
            **found,
            "rest_s": first_s - sum(found.values()),
            "own_s": first_s - found["pytorch_s"],
            "pipelines_in_threads_s": sum(self.in_threads),
            "kernels": len(self.in_threads),
            "wgsl_nbytes": self.wgsl_nbytes,
            "plan_cache_hits": counters.plan_cache_hits,
            "plans": counters.plans_compiled,
            "fallbacks": dict(counters.fallbacks),
        }

    def _count(self) -> None:
        now = time.perf_counter()
        part = self._parts[-1]
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now


@contextmanager
def split() -> Iterator[Split]:
    """Splits what is called inside."""
    from torch_webgpu_compile import backend
    from torch_webgpu_compile.capture.graph import aot
    from torch_webgpu_compile.runtime.native import NativeBackend
    from torch_webgpu_compile.runtime.pipelines import PipelineCache

    found = Split()

    def within(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _works():
                return function(*args, **kwargs)
            found.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                found.leave()

        return call

    def create_pipeline(native: Any, kernel: Any, *args: Any) -> Any:
        start = time.perf_counter()
        made = create(native, kernel, *args)
        with lock:
            found.in_threads.append(time.perf_counter() - start)
            found.wgsl_nbytes += len(kernel.wgsl.encode())
        return made

    def start(_: object) -> None:
        found.enter(PYTORCH)

    def end(_: object) -> None:
        found.leave()

    traced, partition = aot.aot_module_simplified, aot.min_cut_rematerialization_partition
    create, lock = NativeBackend.create_pipeline, threading.Lock()
    waiting = within(PIPELINES, PipelineCache.compile_many)
    entries = ("compile_inference", "compile_forward", "compile_backward", "partition")
    with ExitStack() as stack:
        for place, name, replaced in (
            (backend, "compile_module", within(OURS, backend.compile_module)),
            (aot, "aot_module_simplified", within(PYTORCH, traced)),
            (aot, "min_cut_rematerialization_partition", within(PYTORCH, partition)),
            (PipelineCache, "compile_many", waiting),
            (NativeBackend, "create_pipeline", create_pipeline),
            *((aot.GraphCapture, n, within(OURS, getattr(aot.GraphCapture, n))) for n in entries),
        ):
            stack.enter_context(patch.object(place, name, replaced))
        callback_handler.register_start_callback(start)
        stack.callback(callback_handler.remove_start_callback, start)
        callback_handler.register_end_callback(end)
        stack.callback(callback_handler.remove_end_callback, end)
        yield found


def _works() -> bool:
    """Whether this is a thread whose time is the call's: not one that compiles beside it."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
