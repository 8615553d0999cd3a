"""The phase of the process: a WebGPU library survives neither a fork nor the exit."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Protocol
from weakref import WeakSet

from ..errors import DeviceError

_EXIT_SECONDS = 2.0  # how long the process waits for other threads to leave this package
_GPU_SECONDS = 60.0  # how long for a GPU: one that hangs must not keep it forever
_QUIET_SECONDS = 0.02  # several switch intervals of the interpreter, for threads on their way here


class _Process:
    """The phase of the calling process.

    Attributes:
        used: a device has been opened.
        forked: the library is not called: the driver's threads do not exist in a child process.
        exiting: only the main thread may go on.
        restricted: one of the two.
    """

    used = forked = exiting = restricted = False


process = _Process()


class Worker(Protocol):
    """A device."""

    def wait_at_most(self, seconds: float) -> bool:
        """Until all that was submitted is done, or so long; whether it is done."""


_workers: WeakSet[Worker] = WeakSet()


def use(worker: Worker) -> None:
    """A device has been opened; it is kept by a weak reference."""
    process.used = True
    _workers.add(worker)


@atexit.register
def _end() -> None:
    """Ends the use of GPUs: first other threads', and then the work that was submitted.

    A driver's threads outlive the interpreter. Those of a driver on the CPU compile a kernel when
    it first runs, and crash where the exit handlers of the compiler are faster.
    """
    process.exiting = process.restricted = True
    if not process.used:
        return
    if len(sys._current_frames()) > 1:
        _end_threads()
    if not process.forked:
        for worker in list(_workers):
            finish(worker)


def finish(worker: Worker) -> None:
    """Waits for what was submitted, while the process is exiting."""
    with suppress(Exception):
        worker.wait_at_most(_GPU_SECONDS)


def _end_threads() -> None:
    """Ends threads that still use a GPU, by SystemExit when they next call it.

    Else the interpreter would end them in the middle of C++ and Rust code, which ends the process:
    "terminate called without an active exception". A thread that waits for the interpreter in
    PyTorch's C++, before its kernel is called, has no frame of this package: hence the pause.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    quiet_since = start = time.monotonic()
    while (now := time.monotonic()) < min(start + _EXIT_SECONDS, quiet_since + _QUIET_SECONDS):
        if _is_in_use(package):
            quiet_since = now
        time.sleep(0.001)


def _is_in_use(package: str) -> bool:
    """Whether another thread is executing code of this package, or a backward pass.

    What that calls, it calls in threads of PyTorch's own.
    """
    own = threading.get_ident()
    for identity, top in sys._current_frames().items():
        frame: FrameType | None = top
        while frame is not None and identity != own:
            code = frame.f_code
            if code.co_filename.startswith(package) or code.co_name == "_engine_run_backward":
                return True
            frame = frame.f_back
    return False


def _mark_fork() -> None:
    if process.used:
        process.forked = process.restricted = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_fork)


def refuse() -> None:
    """Raises where a GPU cannot be used."""
    if process.forked:
        raise DeviceError(
            "the GPU cannot be used in a forked child process; start child processes with the "
            "'spawn' method"
        )
    if process.exiting and threading.current_thread() is not threading.main_thread():
        raise SystemExit
