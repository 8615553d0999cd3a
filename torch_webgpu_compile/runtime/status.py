"""`Status`: what the kernels of a device report of indices that are out of range.

Kernels write into one small buffer (`plan.model.Kernel`), only when an index is wrong. Downloads
take it along and set it to 0, in the same submit: what a download copies out is the first report
since the last one, and no report is read twice or lost.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable

from ..checks import IndexCheck
from ..errors import IndexOutOfRangeError
from ..plan.model import STATUS_NBYTES
from .buffers import GpuBuffer
from .interface import Copy, Handle

_LAYOUT = struct.Struct("<IIqI")  # reports, number of the check, index, size


class Status:
    """The reports of one device. Safe to call from several threads.

    Args:
        upload_new: makes a buffer with some content.

    Attributes:
        is_pending: whether kernels with checks were recorded since the last `take`.
        errors: how many have been raised. What was computed and kept before the last one may be
            wrong.
    """

    def __init__(self, upload_new: Callable[[bytes], GpuBuffer]) -> None:
        self._upload_new = upload_new
        self._lock = threading.Lock()
        self._buffers: tuple[GpuBuffer, GpuBuffer] | None = None
        self._checks: list[IndexCheck] = []
        self._numbers: dict[tuple[IndexCheck, ...], int] = {}
        self.is_pending = False
        self.errors = 0

    @property
    def buffer(self) -> GpuBuffer:
        """What kernels bind as `plan.model.STATUS`."""
        return self._memory()[0]

    def _memory(self) -> tuple[GpuBuffer, GpuBuffer]:
        """The status, and zeros to overwrite it with."""
        with self._lock:
            if self._buffers is None:
                zeros = bytes(STATUS_NBYTES)
                self._buffers = self._upload_new(zeros), self._upload_new(zeros)
            return self._buffers

    def first_number(self, checks: tuple[IndexCheck, ...]) -> int:
        """The number on this device of the first of the checks of a dispatch."""
        with self._lock:
            number = self._numbers.get(checks)
            if number is None:
                number = self._numbers[checks] = len(self._checks)
                self._checks += checks
            return number

    def take(self) -> bool:
        """Whether there may be a report; then the caller submits `copies`."""
        if not self.is_pending:
            return False
        # A thread that sets it from here on has recorded already: the caller submits after that.
        self.is_pending = False
        return True

    def copies(self, staging: Handle, position: int) -> list[Copy]:
        """Commands that move the status to bytes of a staging buffer and set it to 0."""
        status, zeros = self._memory()
        return [
            Copy(status.handle, 0, staging, position, STATUS_NBYTES),
            Copy(zeros.handle, 0, status.handle, 0, STATUS_NBYTES),
        ]

    def error_at(self, address: int) -> IndexOutOfRangeError | None:
        """What the status at a host address says; None if nothing was wrong."""
        found: tuple[int, int, int, int] = _LAYOUT.unpack(ctypes.string_at(address, _LAYOUT.size))
        count, check, index, size = found
        if not count:
            return None
        self.errors += 1
        return self._checks[check].error(index, size)
