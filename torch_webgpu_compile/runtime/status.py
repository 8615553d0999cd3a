"""`Status`: reports by kernels of indices that are out of range.

Kernels write into a small buffer (`plan.model.Kernel`), only when an index is wrong. Every thread
has one: an error concerns the thread that launched the operator. Its downloads take the buffer
along and set it to 0, in the same submit, so that no report is read twice or lost. What a thread
leaves behind when it ends is a warning in the next one that waits.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import IndexCheck, IndexOutOfRangeError
from ..plan.model import STATUS_NBYTES
from .buffers import GpuBuffer
from .interface import Copy, Handle

_LAYOUT = struct.Struct("<IIqI")  # reports, number of the check, index, size


@dataclass(slots=True, eq=False)
class Reports:
    """The reports of the operators of one thread.

    Attributes:
        buffer: what its kernels bind as `plan.model.STATUS`.
        thread: whose they are.
        is_pending: whether kernels with checks were recorded since it was last read.
        error: what was read, until it is raised.
    """

    buffer: GpuBuffer
    thread: threading.Thread
    is_pending: bool = False
    error: IndexOutOfRangeError | None = None


class _Own(threading.local):
    reports: Reports | None = None


class Status:
    """The reports of one device. Safe to call from several threads.

    Threads that Python has not started, as autograd's, report to the main thread.

    Args:
        upload_new: makes a buffer with some content.

    Attributes:
        errors: how many have been found. What was computed and kept before the last one may be
            wrong.
    """

    def __init__(self, upload_new: Callable[[bytes], GpuBuffer]) -> None:
        self._upload_new = upload_new
        self._lock = threading.Lock()
        self._zeros: GpuBuffer | None = None
        self._own = _Own()
        self._all: tuple[Reports, ...] = ()
        self._checks: list[IndexCheck] = []
        self._numbers: dict[tuple[IndexCheck, ...], int] = {}
        self.errors = 0

    def own(self) -> Reports:
        """The calling thread's."""
        reports = self._own.reports
        if reports is None:
            reports = self._own.reports = self._reports_of(threading.current_thread())
        return reports

    def _reports_of(self, thread: threading.Thread) -> Reports:
        if isinstance(thread, threading._DummyThread):
            thread = threading.main_thread()
        made = self._upload_new(bytes(STATUS_NBYTES))
        with self._lock:
            for reports in self._all:
                if reports.thread is thread:
                    return reports
                if not (reports.thread.is_alive() or reports.is_pending or reports.error):
                    reports.thread = thread
                    return reports
            reports = Reports(made, thread)
            self._all += (reports,)
            return reports

    def first_number(self, checks: tuple[IndexCheck, ...]) -> int:
        """The number on this device of the first of the checks of a dispatch."""
        with self._lock:
            number = self._numbers.get(checks)
            if number is None:
                number = self._numbers[checks] = len(self._checks)
                self._checks += checks
            return number

    def pending(self) -> list[Reports]:
        """Reports that the calling thread may have; the caller submits `copies` of them.

        Also those of threads that have ended. A thread that lives reads its own: another one that
        had taken them could be late with them.
        """
        own = self._own.reports
        return [
            reports
            for reports in self._all
            if reports.is_pending and (reports is own or not reports.thread.is_alive())
        ]

    def copies(self, taken: list[Reports], staging: Handle, position: int) -> list[Copy]:
        """Commands that move reports to bytes of a staging buffer and set them to 0.

        Call it before they are submitted: a thread that reports from here on has recorded already.
        """
        if self._zeros is None:
            self._zeros = self._upload_new(bytes(STATUS_NBYTES))
        copies = []
        for k, reports in enumerate(taken):
            reports.is_pending = False
            start = position + k * STATUS_NBYTES
            copies.append(Copy(reports.buffer.handle, 0, staging, start, STATUS_NBYTES))
            copies.append(Copy(self._zeros.handle, 0, reports.buffer.handle, 0, STATUS_NBYTES))
        return copies

    def read(self, taken: list[Reports], address: int) -> None:
        """Looks at what `copies` has moved to a host address: `take_error` gives what is found."""
        for k, reports in enumerate(taken):
            data = ctypes.string_at(address + k * STATUS_NBYTES, _LAYOUT.size)
            count, check, index, size = _LAYOUT.unpack(data)
            if count:
                self.errors += 1
                reports.error = self._checks[check].error(index, size)

    def take_error(self) -> IndexOutOfRangeError | None:
        """The error found for the calling thread, once. Warns of threads that were never told."""
        if not self._all:
            return None
        own = self.own()
        for reports in self._all:
            if reports is not own and reports.error is not None and not reports.thread.is_alive():
                missed, reports.error = reports.error, None
                warnings.warn(
                    f"the thread {reports.thread.name!r} has ended before it was told: {missed}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        error, own.error = own.error, None
        return error
