"""What torch must be told for this backend: settings and callbacks of Dynamo, repairs for threads.

Dynamo traces before it calls a backend, so its settings cannot be made around one compilation.
They change defaults only: a value that the user has set wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from threading import Event, Thread
from typing import Any

import torch
from torch.fx import GraphModule

from ...torch_private import (
    RandomValueSource,
    _ensureCUDADeviceGuardSet,
    callback_handler,
    cuda_is_compiled,
)
from ...torch_private import dynamo_config as config

# Dynamo stops at RNN, GRU and LSTM modules by default. They trace well on the supported versions
# (export allows them by default, too), and other backends get the same traced graph.
DEFAULTS = {"allow_rnn": True}


def set_defaults() -> None:
    """Changes Dynamo's defaults as `DEFAULTS` says. Called once, when the backend is loaded."""
    for name, value in DEFAULTS.items():
        entry = getattr(config, "_config", {}).get(name)
        if entry is not None and hasattr(entry, "default"):
            # Not an assignment to `config`: from torch 2.13 on that holds for one thread only.
            entry.default = value
        else:
            setattr(config, name, value)
    _keep_device_guard()


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

    callback_handler.register_start_callback(start)


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


def converting(
    compiled: Callable[..., Any], dtypes: Mapping[int, torch.dtype]
) -> Callable[..., Any]:
    """``compiled``, called with the arguments at these positions in these dtypes."""
    if not dtypes:
        return compiled

    def call(*arguments: Any) -> Any:
        given = list(arguments)
        for position, dtype in dtypes.items():
            given[position] = given[position].to(dtype)
        return compiled(*given)

    return call


@contextmanager
def compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` holds meanwhile, as from torch 2.13 on it does anyway.

    FX keeps one flag per process for "a trace is under way", and AOTAutograd traces with FX. In
    any other thread a call of a compiled function, even one that has nothing to compile, fails
    meanwhile ("using FX to symbolically trace a dynamo-optimized function"), unless the trace is
    known to be a compiler's. Dynamo's lock is held here: nobody else compiles.
    """
    if hasattr(torch.compiler, "_compile_session_context"):  # Dynamo has entered it
        yield
        return
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


@cache
def _keep_device_guard() -> None:
    """Makes compiling safe after the thread that compiled first has ended.

    A torch with CUDA on a machine without it replaces CUDA's device guard when a graph is first
    traced. The process uses that guard from then on, but it is freed with the thread that made it
    (c10/core/impl/DeviceGuardImplInterface.cpp), and the next trace crashes. So a thread that
    never ends makes it. The condition is that of FakeTensorMode.
    """
    if not cuda_is_compiled() or torch.cuda.is_available():
        return
    made = Event()

    def make_and_stay() -> None:
        _ensureCUDADeviceGuardSet()
        made.set()
        Event().wait()

    Thread(target=make_and_stay, name="torch-webgpu-device-guard", daemon=True).start()
    made.wait()
