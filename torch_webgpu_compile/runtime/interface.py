"""What the runtime gives to `native.NativeBackend` and gets from it. Handles are opaque."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# WebGPU spec, GPUBufferUsage and GPUMapMode.
MAP_READ = 0x1
MAP_WRITE = 0x2
COPY_SRC = 0x4
COPY_DST = 0x8
UNIFORM = 0x40
STORAGE = 0x80
QUERY_RESOLVE = 0x200

Handle = Any


BindGroupMaker = Callable[[Sequence[Handle], Sequence[int]], Handle]
"""From the buffers of all bindings to a bind group, which is freed once its handle is dropped.

The second argument is where each binding's buffer starts, in bytes, or () for the beginning of all.
Raises DeviceError. Not to be called by two threads at once.
"""

DispatchItem = tuple[Handle | None, Handle, int, int, int]
"""(pipeline, or None when it is the previous one's; bind group; x, y, z)."""


@dataclass(slots=True)
class DispatchRun:
    """Consecutive dispatches. The first one has a pipeline."""

    items: list[DispatchItem] = field(default_factory=list)


@dataclass(slots=True)  # frozen would take three times as long to make
class Copy:
    """A copy between buffers; offsets and nbytes are multiples of 4 bytes."""

    source: Handle
    source_offset: int
    destination: Handle
    destination_offset: int
    nbytes: int


Command = DispatchRun | Copy

Span = tuple[float, float]
"""When a dispatch began and ended, in seconds of some clock."""
