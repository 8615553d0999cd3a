"""`Backend`: the runtime's interface to WebGPU providers, and the commands that it submits.

`native.NativeBackend` is it, for each library that speaks ``webgpu.h``. Handles are opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..plan.model import Kernel

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


class Backend(Protocol):
    """A device of a provider. All failures are raised as exceptions of `errors`.

    Safe to call from several threads: `submit` orders itself by a lock.

    Attributes:
        lost_cause: what was reported when the device was found lost; "" while it works.
        submissions: submits made so far.
    """

    lost_cause: str
    submissions: int

    def find_loss(self) -> bool:
        """Whether the device is lost, known so far or not: it is asked, as far as it can be."""

    def create_buffer(self, nbytes: int, usage: int) -> Handle:
        """A buffer of nbytes, a multiple of 4. Raises OutOfMemoryError."""

    def release_buffer(self, handle: Handle) -> None:
        """Frees the memory as soon as the GPU no longer uses it."""

    def create_pipeline(self, kernel: Kernel, checked: bool) -> tuple[Handle, Handle]:
        """(pipeline, bind group layout). Raises ShaderError."""

    def bind_group_maker(
        self, layout: Handle, ranges: Sequence[tuple[int, int]], name: str
    ) -> BindGroupMaker:
        """Makes bind groups of one kernel.

        Args:
            ranges: (offset in bytes, nbytes) of each binding.
            name: the kernel's, for errors.
        """

    def submit(self, commands: Sequence[Command], name: str) -> int:
        """Encodes and submits in order, without waiting; a number for `map`.

        Adjacent dispatches share a compute pass. Nothing is submitted when an error is raised.
        """

    def wait(self) -> None:
        """Until everything that was submitted is done."""

    def write_buffer(self, handle: Handle, offset: int, address: int, nbytes: int) -> None:
        """Copies host memory into a buffer before the next submit; multiples of 4 bytes."""

    def write_bytes(self, handle: Handle, data: bytes) -> None:
        """`write_buffer` of a few bytes to the start of a buffer; a multiple of 4 bytes."""

    def fill_staging(
        self, handle: Handle, address: int, nbytes: int, submission: int | None
    ) -> None:
        """Copies host memory into a MAP_WRITE buffer.

        Args:
            submission: the one that last read it, to be waited for; None if there was none.
        """

    def map(self, handle: Handle, nbytes: int, submission: int | None) -> int:
        """Maps a MAP_READ buffer after ``submission``, which filled it; the host address."""

    def unmap(self, handle: Handle) -> None:
        """Ends the mapping; required before the buffer is used in a submit."""

    def submit_timed(self, run: DispatchRun, name: str) -> list[Span] | None:
        """Runs the dispatches one by one and waits; None (and does nothing) without timestamps."""
