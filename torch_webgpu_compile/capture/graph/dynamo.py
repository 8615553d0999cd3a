"""What torch must be told for this backend: callbacks of Dynamo, repairs for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from threading import Event, Thread, get_ident
from typing import Any

import torch
from torch.fx import GraphModule

from ...stages import Stage
from ...torch_private import (
    RandomValueSource,
    _compile_session_context,
    _ensureCUDADeviceGuardSet,
    callback_handler,
    cuda_is_compiled,
)
from ..patches import compiling_flag


def on_first_compile(function: Callable[[], None]) -> None:
    """Calls ``function`` in a thread of its own as soon as Dynamo starts to trace anything.

    Tracing takes seconds of Python; what waits for a driver meanwhile costs nothing. Exceptions are
    dropped: whoever needs the function's work does it again and gets them.
    """
    started = False

    def run() -> None:
        with suppress(Exception):
            function()

    def start(_: object) -> None:
        nonlocal started
        if not started:
            started = True
            Thread(target=run, name="torch-webgpu-first-compile").start()

    if callback_handler is not None:
        callback_handler.register_start_callback(start)


@contextmanager
def stages() -> Iterator[None]:
    """Makes `Stage`s of what Dynamo does in this thread meanwhile.

    Kind ``dynamo``; for a backward graph that AOTAutograd kept until its first call ``autograd``.
    """
    if callback_handler is None:
        yield
        return
    thread, under_way = get_ident(), list[Stage]()

    def start(cause: Any) -> None:
        if get_ident() == thread:
            trigger = getattr(cause, "callback_trigger", None)
            is_backward = getattr(trigger, "name", "") == "LAZY_BACKWARD"
            under_way.append(Stage("autograd" if is_backward else "dynamo").__enter__())

    def end(_: object) -> None:
        if under_way and get_ident() == thread:
            under_way.pop().__exit__()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def misdescribed(module: GraphModule) -> dict[int, torch.dtype]:
    """By position, what Dynamo's graph says of arguments that calls may give in another dtype.

    A number of Python's ``random`` is a float32 tensor in the graph, as ``torch.tensor`` makes it,
    and a float64 tensor in the call (``torch._as_tensor_fullprec``).
    """
    return {
        position: node.meta["example_value"].dtype
        for position, node in enumerate(module.graph.find_nodes(op="placeholder"))
        if isinstance(getattr(node.meta.get("grapharg"), "source", None), RandomValueSource)
    }


def compiling() -> AbstractContextManager[None]:
    """``torch.compiler.is_compiling()`` holds meanwhile; Dynamo's lock is held here."""
    if _compile_session_context is not None:  # Dynamo has entered it
        return nullcontext()
    return compiling_flag.install()


@cache
def keep_device_guard() -> None:
    """Makes compiling safe after the thread that compiled first has ended.

    A torch with CUDA on a machine without it replaces CUDA's device guard when a graph is first
    traced. The process uses that guard from then on, but it is freed with the thread that made it
    (c10/core/impl/DeviceGuardImplInterface.cpp), and the next trace crashes. So a thread that
    never ends makes it. The condition is that of FakeTensorMode.
    """
    is_built = cuda_is_compiled is not None and cuda_is_compiled()
    if not is_built or torch.cuda.is_available():
        return
    made = Event()

    def make_and_stay() -> None:
        _ensureCUDADeviceGuardSet()
        made.set()
        Event().wait()

    Thread(target=make_and_stay, name="torch-webgpu-device-guard", daemon=True).start()
    made.wait()
