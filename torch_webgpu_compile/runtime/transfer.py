"""Copies between host memory and GPU buffers through reused staging buffers.

WebGPU copies need offsets and sizes that are multiples of 4 (spec, GPUCommandEncoder
copyBufferToBuffer and GPUQueue writeBuffer). Other ranges are widened: on download the surplus is
not copied out, on upload the words at the ends keep their other bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DeviceError, IndexOutOfRangeError
from ..plan.model import STATUS_NBYTES
from .buffers import AnyBuffer, BufferPool, GpuBuffer, round_up
from .host_copy import copy_memory
from .interface import COPY_DST, COPY_SRC, MAP_READ, MAP_WRITE, Copy, Handle
from .native import NativeBackend
from .queue import MAX_BATCH, CommandQueue, Recording
from .status import Reports, Status

Memory = tuple[int, int]
"""Host memory as (address, nbytes)."""

BufferRange = tuple[AnyBuffer, int, int, int]
"""(buffer, offset in bytes, nbytes, host address)."""

_CHUNK = 16 << 20  # bytes per staging buffer at most
_MIN_CHUNK = 2 << 20  # a chunk costs about 50 µs besides the copies
_STAGED = 4 << 20  # uploads from this many bytes on go through staging buffers of our own
_RECORDED = 1 << 20  # of so many bytes, a copy on the GPU costs less than a submit
_IN_FLIGHT = 3  # staging buffers of one transfer: the host copies one while the GPU copies others
_SMALLEST = 64 << 10
_FEW = 32 << 10  # bytes that certainly fit into the smallest staging buffer, reports included


def host_memory(source: Any) -> tuple[int, int, Any]:
    """(address, nbytes, the object to keep alive) of a buffer-protocol object or (address, nbytes).

    At address 0 there are zeros: PyTorch has tensors of zeros that have no memory.

    Raises:
        ValueError: the object is not contiguous.
    """
    if isinstance(source, tuple):
        address, nbytes = int(source[0]), int(source[1])
        if address or not nbytes:
            return address, nbytes, None
        source = np.zeros(nbytes, np.uint8)
    view = memoryview(source)
    if not view.c_contiguous:
        raise ValueError("host memory must be contiguous")
    if not view.nbytes:
        return 0, 0, view
    array = np.frombuffer(view, dtype=np.uint8)
    return int(array.__array_interface__["data"][0]), view.nbytes, array


def _check(buffer: AnyBuffer, offset: int, nbytes: int, what: str) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > buffer.capacity:
        raise DeviceError(
            f"{what} of {nbytes} bytes at offset {offset} is outside a buffer of "
            f"{buffer.nbytes} bytes; check the tensor's sizes and strides"
        )


def _ends_with_word(buffer: AnyBuffer, end: int) -> bool:
    """Whether all of the word that ends an upload may be written: nothing of value follows."""
    return not end % 4 or end >= buffer.nbytes


def _chunk_nbytes(nbytes: int) -> int:
    """Four chunks overlap the host's copies with the GPU's, more cost more."""
    return min(_CHUNK, max(_MIN_CHUNK, 1 << max(0, nbytes // 4 - 1).bit_length()))


class Transfers:
    """Uploads and downloads of one device. Safe to call from several threads."""

    def __init__(
        self, backend: NativeBackend, pool: BufferPool, queue: CommandQueue, status: Status
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._queue = queue
        self._status = status
        self._lock = threading.Lock()
        self._staging: dict[int, list[Handle]] = {}
        self._uploads: deque[_UploadStaging] = deque()
        self._written = 0

    def upload(
        self, buffer: AnyBuffer, source: Any, offset: int = 0, is_idle: bool = False
    ) -> None:
        """Copies host memory into a buffer; the memory may be reused when this returns.

        Args:
            is_idle: the buffer was allocated as idle, and no command uses it yet.

        Raises:
            DeviceError: the range is outside the buffer, or the device failed.
        """
        address, nbytes, keep = host_memory(source)
        _check(buffer, offset, nbytes, "an upload")
        if not nbytes:
            return
        if is_idle or self._queue.is_empty:
            self._put(buffer, offset, address, nbytes)
        elif nbytes <= _RECORDED and not offset % 4 and _ends_with_word(buffer, offset + nbytes):
            self._record(buffer, offset, address, nbytes)
        else:
            self._queue.flush()  # pending commands may still need what the buffer holds now
            self._put(buffer, offset, address, nbytes)
        del keep

    def _record(self, buffer: AnyBuffer, offset: int, address: int, nbytes: int) -> None:
        """Uploads to idle memory, and records a copy from there to words of a buffer."""
        beside = self._pool.allocate(nbytes, is_idle=True)
        self._put(beside, 0, address, nbytes)
        start = buffer.offset_nbytes + offset
        copy = Copy(beside.handle, 0, buffer.handle, start, round_up(nbytes, 4))
        self._queue.record(Recording([copy], "an upload"))
        self._count_written(_CHUNK // MAX_BATCH)

    def _put(self, buffer: AnyBuffer, offset: int, address: int, nbytes: int) -> None:
        """Uploads before the pending commands."""
        end = offset + nbytes
        first, last = offset + 3 & ~3, end & ~3
        if offset % 4 or first > last:
            self._patch(buffer, offset, address, min(first, end) - offset)
        if last > first:
            self._upload_words(buffer, first, address + first - offset, last - first)
        if last >= first and end % 4:
            if _ends_with_word(buffer, end):
                word = np.zeros(4, np.uint8)
                ctypes.memmove(word.ctypes.data, address + last - offset, end - last)
                self._write(buffer, last, word.ctypes.data, 4)
            else:
                self._patch(buffer, last, address + last - offset, end - last)

    def _upload_words(self, buffer: AnyBuffer, offset: int, address: int, nbytes: int) -> None:
        start = buffer.offset_nbytes + offset
        if nbytes < _STAGED:
            self._backend.write_buffer(buffer.handle, start, address, nbytes)
            self._count_written(nbytes)
            return
        chunk = _chunk_nbytes(nbytes)
        for done in range(0, nbytes, chunk):
            part = min(chunk, nbytes - done)
            staging = self._writable_staging()
            try:
                self._backend.fill_staging(staging.handle, address + done, part, staging.submission)
                copy = Copy(staging.handle, 0, buffer.handle, start + done, part)
                staging.submission = self._queue.submit([copy], "an upload")
            except BaseException:
                self._backend.release_buffer(staging.handle)
                raise
            with self._lock:
                self._uploads.append(staging)

    def _write(self, buffer: AnyBuffer, offset: int, address: int, nbytes: int) -> None:
        self._backend.write_buffer(buffer.handle, buffer.offset_nbytes + offset, address, nbytes)

    def upload_bytes(self, buffer: GpuBuffer, data: bytes) -> None:
        """`upload` to the start of an idle buffer, without the general case's checks."""
        if not data:
            return
        if len(data) % 4:
            data += bytes(-len(data) % 4)
        self._backend.write_buffer(buffer.handle, 0, data, len(data))

    def _count_written(self, nbytes: int) -> None:
        """Submits now and then: the provider keeps what was written until the next submit."""
        with self._lock:
            self._written += nbytes
            if self._written < _CHUNK:
                return
            self._written = 0
        self._queue.submit([], "an upload")

    def _writable_staging(self) -> _UploadStaging:
        """The staging buffer whose last copy is oldest, or another one while there are few."""
        with self._lock:
            if len(self._uploads) >= _IN_FLIGHT:
                return self._uploads.popleft()
        return _UploadStaging(self._pool.create(_CHUNK, MAP_WRITE | COPY_SRC))

    def _patch(self, buffer: AnyBuffer, offset: int, address: int, nbytes: int) -> None:
        """Writes a few bytes within one word of a buffer, keeping the others."""
        start = offset & ~3
        word = np.empty(4, np.uint8)
        self._read(buffer, start, 4, word.ctypes.data, [], False)
        ctypes.memmove(word.ctypes.data + offset - start, address, nbytes)
        self._write(buffer, start, word.ctypes.data, 4)

    def download_many(self, ranges: Sequence[BufferRange]) -> None:
        """Fills host memory from ranges of buffers, with one submit and one wait (per chunk).

        Raises:
            DeviceError: a range is outside its buffer, or the device failed.
            IndexOutOfRangeError: a kernel before reported an index. The host memory is as before.
        """
        if len(ranges) == 1 and 0 < ranges[0][2] <= _FEW:
            buffer, offset, nbytes, address = ranges[0]
            _check(buffer, offset, nbytes, "a download")
            self._read(buffer, offset, nbytes, address, self._status.pending(), True)
            return
        started = self.start_download([entry[:3] for entry in ranges])
        started.finish([entry[3] for entry in ranges])

    def _read(
        self,
        buffer: AnyBuffer,
        offset: int,
        nbytes: int,
        address: int,
        reports: list[Reports],
        raises: bool,
    ) -> None:
        """`Download` of one range of a few bytes."""
        piece = _Piece(buffer, offset, nbytes, 0, 0, 0)
        total = piece.nbytes + len(reports) * STATUS_NBYTES
        error = self.finish_round(self.start_round([piece], total, reports), [address], raises)
        if error is not None:
            raise error

    def start_download(self, ranges: Sequence[tuple[AnyBuffer, int, int]]) -> Download:
        """Submits the copies of a download of (buffer, offset, nbytes) ranges.

        What the host does before `Download.finish` costs no time while the GPU works.

        Raises:
            DeviceError: a range is outside its buffer, or the device failed.
        """
        for buffer, offset, nbytes in ranges:
            _check(buffer, offset, nbytes, "a download")
        reports = self._status.pending() if any(entry[2] for entry in ranges) else []
        return Download(self, ranges, reports)

    def read_status(self) -> None:
        """Waits for kernels that check indices, if there were any.

        Raises:
            IndexOutOfRangeError: one of this thread's reported an index.
        """
        reports = self._status.pending()
        if reports:
            Download(self, (), reports).finish(())

    def start_round(self, pieces: list[_Piece], total: int, reports: list[Reports]) -> _Round:
        """Submits copies to ``total`` bytes of a staging buffer; the last are the reports."""
        nbytes = max(_SMALLEST, 1 << (total - 1).bit_length())
        with self._lock:
            free = self._staging.get(nbytes)
            staging = None
            if free:  # no call in between, where Ctrl-C would lose it
                staging = free[-1]
                del free[-1]
        if staging is None:
            staging = self._pool.create(nbytes, MAP_READ | COPY_DST)
        try:
            copies = [
                Copy(piece.buffer.handle, piece.start, staging, piece.position, piece.nbytes)
                for piece in pieces
            ]
            if reports:
                start = total - len(reports) * STATUS_NBYTES
                copies += self._status.copies(reports, staging, start)
            submission = self._queue.submit(copies, "a download")
        except BaseException:
            for entry in reports:
                entry.is_pending = True
            self._backend.release_buffer(staging)
            raise
        return _Round(staging, nbytes, total, pieces, submission, reports)

    def finish_round(
        self, current: _Round, addresses: Sequence[int], raises: bool = True
    ) -> IndexOutOfRangeError | None:
        """Waits for a round and copies it out; or gives the error that makes it void."""
        address = self._backend.map(current.staging, current.total, current.submission)
        if current.reports:
            start = address + current.total - len(current.reports) * STATUS_NBYTES
            self._status.read(current.reports, start)
        error = self._status.take_error() if raises else None
        for piece in () if error else current.pieces:
            source = address + piece.position + piece.skip
            copy_memory(addresses[piece.index] + piece.done, source, piece.wanted)
        self._backend.unmap(current.staging)
        with self._lock:
            self._staging.setdefault(current.nbytes, []).append(current.staging)
        return error

    def staging(self) -> tuple[int, int]:
        """How many buffers for transfers are kept in the host's memory, and their bytes."""
        with self._lock:
            sizes = [nbytes for nbytes, kept in self._staging.items() for _ in kept]
            sizes += [_CHUNK] * len(self._uploads)
        return len(sizes), sum(sizes)

    def empty(self) -> None:
        """Frees the staging buffers that are not in use."""
        with self._lock:
            staging, self._staging = self._staging, {}
            uploads, self._uploads = self._uploads, deque()
        for upload in uploads:
            self._backend.release_buffer(upload.handle)
        for handles in staging.values():
            for handle in handles:
                self._backend.release_buffer(handle)


class Download:
    """A download that has been submitted: see `Transfers.start_download`.

    If it is dropped, so are its staging buffers: they may still be written.

    ``reports``: what its first round takes along of them, so that nothing is copied out after an
    error: what was computed since the last one is void.
    ``is_partial``: some of the host memory has been written.
    """

    is_partial = False

    def __init__(
        self,
        transfers: Transfers,
        ranges: Sequence[tuple[AnyBuffer, int, int]],
        reports: list[Reports],
    ) -> None:
        self._transfers = transfers
        self._started: deque[_Round] = deque()
        self._rounds = iter(_rounds(ranges, reports))
        self._start()

    def _start(self) -> None:
        while len(self._started) < _IN_FLIGHT:
            following = next(self._rounds, None)
            if following is None:
                return
            self._started.append(self._transfers.start_round(*following))

    def finish(self, addresses: Sequence[int]) -> None:
        """Waits, and copies each range to a host address.

        Raises:
            DeviceError: the device failed.
            IndexOutOfRangeError: a kernel of this thread before it reported an index. Nothing was
                copied out.
        """
        while self._started:
            error = self._transfers.finish_round(self._started[0], addresses)
            del self._started[0]
            if error is not None:
                self._started.clear()
                raise error
            self.is_partial = True
            self._start()


class _Piece:
    """A part of a range.

    ``nbytes`` from ``start`` of a buffer land at ``position`` of the staging buffer, and ``wanted``
    of them, after ``skip``, go to the host memory of range ``index``, after ``done`` bytes.
    """

    __slots__ = ("buffer", "done", "index", "nbytes", "position", "skip", "start", "wanted")

    def __init__(
        self, buffer: AnyBuffer, offset: int, wanted: int, index: int, done: int, position: int
    ) -> None:
        self.buffer = buffer
        self.start = buffer.offset_nbytes + (offset & ~3)
        self.skip = offset & 3
        self.nbytes = (self.skip + wanted + 3) & ~3
        self.wanted = wanted
        self.index = index
        self.done = done
        self.position = position


@dataclass(slots=True)
class _Round:
    """A filled staging buffer of ``nbytes``, ``total`` of them in use; reports are at its end."""

    staging: Handle
    nbytes: int
    total: int
    pieces: list[_Piece]
    submission: int
    reports: list[Reports]


@dataclass(slots=True)
class _UploadStaging:
    """A mappable buffer of _CHUNK bytes and the submission that last read it."""

    handle: Handle
    submission: int | None = None


def _rounds(
    ranges: Sequence[tuple[AnyBuffer, int, int]], reports: list[Reports]
) -> list[tuple[list[_Piece], int, list[Reports]]]:
    """Packs ranges into the contents of staging buffers, with their bytes.

    ``reports``: what the first one, which has room for them, ends with.
    """
    chunk = _chunk_nbytes(sum([nbytes for _, _, nbytes in ranges]))
    chunk -= len(reports) * STATUS_NBYTES
    rounds: list[tuple[list[_Piece], int]] = []
    pieces: list[_Piece] = []
    position = 0
    for index, (buffer, offset, nbytes) in enumerate(ranges):
        done = 0
        while done < nbytes:
            room = chunk - position
            if room < 16:
                rounds.append((pieces, position))
                pieces, position = [], 0
                continue
            part = min(nbytes - done, room - 8)
            piece = _Piece(buffer, offset + done, part, index, done, position)
            pieces.append(piece)
            position += round_up(piece.nbytes, 8)
            done += part
    if pieces or (reports and not rounds):
        rounds.append((pieces, position))
    if not rounds:
        return []
    (first, nbytes), *others = rounds
    total = nbytes + len(reports) * STATUS_NBYTES
    return [(first, total, reports), *((*entry, []) for entry in others)]
