"""Callbacks of ``webgpu.h`` that Ctrl-C cannot get lost in."""

from __future__ import annotations

from typing import Any


class Signal:
    """A callback, to be used for one thing after another.

    Args:
        ffi: of the library that calls it.
        kind: WGPUBufferMapCallback or WGPUQueueWorkDoneCallback.
        mode: WGPUCallbackMode.

    Attributes:
        statuses: what the callback was given since the list was emptied: empty while it is awaited.
        info: for the function that calls back.
    """

    def __init__(self, ffi: Any, kind: str, mode: int) -> None:
        self.statuses: list[int] = []
        # The callback's first argument is its status. The others are left where the caller put
        # them, as every calling convention of 64-bit machines allows: with one argument the
        # callback can be C code, which Ctrl-C does not interrupt. The text of a failure is
        # reported to `Guard` besides.
        self._callback = ffi.callback("void(int)", self.statuses.append)
        self.info = ffi.new(f"{kind}Info *")
        self.info.mode = mode
        self.info.callback = ffi.cast(kind, self._callback)
