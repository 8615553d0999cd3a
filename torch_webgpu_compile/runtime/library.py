"""`Library`: the differences between the libraries that speak ``webgpu.h``.

`native.NativeBackend` runs on both through their cffi functions; all that it has to know of which
of them it runs on is here. `wgpu_native` and `dawn` are the two tables.
"""

from __future__ import annotations

from typing import Any, Protocol

from .interface import Handle
from .signals import Signal

AWAKE_SECONDS = 1e-3
"""How long a wait for a GPU asks again and again before it sleeps: a thread that sleeps notices the
end 70 µs late on an H100's host.
"""

Report = tuple[str, str]
"""(kind, message) of an error: the kind is ``Validation``, ``OutOfMemory``, ``Internal``, …."""


class Library(Protocol):
    """A device, opened through one of the libraries.

    Attributes:
        ffi, lib: the library's cffi objects.
        device, queue: handles, which are released with this object.
        submit: the C function ``f(queue, count, command buffers)`` that submits; its result is the
            number of the submission, or None.
        refuses_submits: whether that reports what is wrong; else it ends the process.
        callback_mode: the ``WGPUCallbackMode`` of mappings.
        awake_seconds: how long a wait stays awake, see `AWAKE_SECONDS`.
    """

    ffi: Any
    lib: Any
    device: Handle
    queue: Handle
    submit: Any
    refuses_submits: bool
    callback_mode: int
    awake_seconds: float

    def capture(self) -> None:
        """From here on this thread's errors are collected for `release`, its counterpart."""

    def release(self) -> Report | None:
        """The last error of this thread's calls since `capture`."""

    def find_loss(self) -> str:
        """The cause, if the device is lost, known so far or not; else ""."""

    def mark(self, submission: int) -> Handle:
        """A mark for `wait`, of a submission that is the last one until now."""

    def wait(self, mark: Handle | None) -> None:
        """Waits until the marked submission is done; with None, until every submission is."""

    def wait_at_most(self, seconds: float) -> bool:
        """Until everything that was submitted is done, or so long; whether it is done."""

    def wait_for_map(self, future: Handle, mapped: Signal, submission: int | None) -> None:
        """Until a mapping's callback has been called, or another thread is about to call it.

        Args:
            future: what ``wgpuBufferMapAsync`` gave.
            mapped: its callback.
            submission: the last that uses the buffer, None for none.
        """

    def create_module(self, descriptor: Handle, checked: bool) -> Handle:
        """``wgpuDeviceCreateShaderModule``; without ``checked`` bounds are not checked."""

    def prepare_wgsl(self, wgsl: str) -> str:
        """A kernel's text as this library's compiler wants it; its lines keep their numbers."""

    def tick_seconds(self) -> float:
        """The unit of timestamps."""
