"""`Device`: memory, transfers and pipelines of one GPU.

Nothing outside this package knows the provider.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import AdapterError, DeviceError, DeviceLostError, human_bytes
from ..options import CompileOptions, from_environment, holds_clock
from ..target import Target
from . import nvidia_clock
from .adapters import AdapterInfo, choose_provider, find_adapter, list_adapters, open_library
from .buffers import (
    SMALL_NBYTES,
    SMALL_USAGE,
    STORAGE_USAGE,
    AnyBuffer,
    BufferPool,
    GpuBuffer,
)
from .failures import lost_error
from .interface import Copy
from .native import NativeBackend
from .pacing import pace_of
from .pipelines import PipelineCache
from .queue import CommandQueue, Recording
from .status import Status
from .transfer import BufferRange, Download, Transfers, host_memory

__all__ = ["AdapterInfo", "Device", "GpuBuffer", "list_adapters", "open_device"]


class Reclaimable(Protocol):
    """Holds memory that it can do without."""

    def reclaim(self) -> None:
        """Drops everything that is not in use."""


def unless_held(lock: threading.RLock, *drop: Callable[[], object]) -> None:
    """Drops what a lock protects, unless another thread has it: what is in use is left alone."""
    if lock.acquire(blocking=False):
        try:
            for each in drop:
                each()
        finally:
            lock.release()


class Holder(Protocol):
    """Holds GPU memory."""

    def held(self) -> tuple[str, int]:
        """(the use of the memory, its bytes)."""


class Device:
    """An open GPU. Use `open_device`.

    Attributes:
        info: the adapter.
        target: limits and features, as the compiler sees them.
        pace: what its kernels are taken to reach, when submissions are bounded.
        checked: whether kernels are compiled with the provider's runtime checks.
        queue: the order of all commands.
        pool, transfers, pipelines: memory, copies of it from and to the host's, compiled kernels.
        allocate: a storage buffer of so many bytes with undefined contents; raises
            OutOfMemoryError. What a method would do, without one more call for each new tensor.
        status: what kernels report.
        opened_as: the arguments of `open_device`.
        is_closed: whether `close` was called.
        on_wait: called before the host waits for what it reads of the GPU's memory.
    """

    on_wait: Callable[[], None] | None = None

    def __init__(self, info: AdapterInfo, backend: NativeBackend, checked: bool) -> None:
        self.info = info
        self.target: Target = info.target()
        self.pace = pace_of(info.type)
        self.checked = checked
        self.backend = backend
        self.queue = CommandQueue(backend)
        self.opened_as: _DeviceKey | None = None
        self.is_closed = False
        self._abandoned = False
        self._reclaimable: weakref.WeakSet[Reclaimable] = weakref.WeakSet()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.pool = BufferPool(
            backend,
            self.queue,
            self.target.max_buffer_nbytes,
            self._make_room,
            self._describe_memory,
        )
        self.allocate: Callable[[int], GpuBuffer] = self.pool.allocate
        self.status = Status(self.upload_new)
        self.transfers = Transfers(backend, self.pool, self.queue, self.status)
        self.pipelines = PipelineCache(backend, checked)

    # ---- memory

    def _describe_memory(self) -> str:
        """Memory in use by its holders, the most first."""
        found: Counter[str] = Counter()
        for holder in list(self._holders):
            kind, nbytes = holder.held()
            found[kind] += nbytes
        found["tensors and running calls"] = max(
            0, self.pool.stats()["allocated"] - sum(found.values())
        )
        held = [f"{kind} {human_bytes(nbytes)}" for kind, nbytes in found.most_common() if nbytes]
        largest = ", ".join(map(human_bytes, self.pool.largest(3)))
        return ", ".join(held or ["nothing"]) + (f"; the largest: {largest}" if largest else "")

    def add_holder(self, holder: Holder) -> None:
        """Errors about memory will name what ``holder`` (kept by a weak reference) holds."""
        self._holders.add(holder)

    def empty_cache(self) -> None:
        """Frees all GPU memory that no tensor and no running call needs."""
        if self.is_lost:
            self.abandon()
            return
        for holder in list(self._reclaimable):
            holder.reclaim()
        self.transfers.empty()
        self.pool.empty()

    def _make_room(self) -> None:
        self.empty_cache()
        self.queue.wait()  # memory that the GPU still uses is freed when its work is done

    def abandon(self) -> None:
        """Drops all that is kept of a lost device, but what tensors and running calls hold."""
        self._abandoned = True
        for holder in list(self._reclaimable):
            holder.reclaim()
        self.transfers.empty()
        self.pool.abandon()

    def add_reclaimable(self, holder: Reclaimable) -> None:
        """`empty_cache` will ask ``holder`` (kept by a weak reference) to drop what it can."""
        self._reclaimable.add(holder)

    # ---- transfers

    def upload(self, buffer: AnyBuffer, source: Any, offset: int = 0) -> None:
        """Copies host memory into a buffer, in order with submitted work.

        Args:
            source: an object with the buffer protocol, or (address, nbytes). It may be changed as
                soon as this returns.
            offset: bytes into the buffer, any value.

        Raises:
            DeviceError: the range is outside the buffer, or the device failed.
        """
        try:
            self.transfers.upload(buffer, source, offset)
        finally:
            buffer.memory.version = 0

    def upload_new(self, source: Any, usage: int = STORAGE_USAGE) -> GpuBuffer:
        """A new buffer with this content. Unlike `upload` it leaves pending commands pending.

        (From 4 MiB on, and every 16 MiB, it does submit them.)

        Args:
            source: as for `upload`.

        Raises:
            OutOfMemoryError, DeviceError: as `allocate` and `upload`.
        """
        address, nbytes, keep = host_memory(source)
        buffer = self.pool.allocate(nbytes, usage, is_idle=True)
        self.transfers.upload(buffer, (address, nbytes), is_idle=True)
        del keep
        return buffer

    def upload_small(self, data: bytes, buffer: GpuBuffer | None = None) -> GpuBuffer:
        """`upload_new` of at most `SMALL_NBYTES` to a storage and uniform buffer.

        For the scalars and seeds of one call; drop the buffer once the commands are recorded.

        Args:
            buffer: one from an earlier call to use again, which no pending command needs.

        """
        if buffer is None:  # all of one size, so that they are reused whatever they hold
            buffer = self.pool.allocate(SMALL_NBYTES, SMALL_USAGE, is_idle=True)
        self.transfers.upload_bytes(buffer, data)
        return buffer

    def download_many(self, ranges: Sequence[BufferRange]) -> None:
        """Waits for all work so far and fills host memory, with one submit.

        Args:
            ranges: (buffer, offset in bytes, nbytes, host address) of each part, of any value.

        Raises:
            IndexOutOfRangeError: a kernel before found an index from data out of range.
        """
        if self.on_wait is not None:
            self.on_wait()
        self.transfers.download_many(ranges)

    def start_download(self, ranges: Sequence[tuple[AnyBuffer, int, int]]) -> Download:
        """Submits a download of (buffer, offset, nbytes) ranges; `Download.finish` waits for it."""
        return self.transfers.start_download(ranges)

    def copy(
        self,
        source: AnyBuffer,
        source_offset: int,
        destination: GpuBuffer,
        destination_offset: int,
        nbytes: int,
    ) -> None:
        """Copies between two buffers, in order with submitted work, without waiting.

        Args:
            source_offset, destination_offset, nbytes: bytes, multiples of 4.
        """
        if source.serial == destination.serial:
            raise DeviceError("a copy within one buffer is not possible in WebGPU; use two buffers")
        copy = Copy(
            source.handle,
            source.offset_nbytes + source_offset,
            destination.handle,
            destination_offset,
            nbytes,
        )
        self.queue.record(Recording([copy], "a copy"))
        destination.memory.version = 0

    # ---- life

    def synchronize(self) -> None:
        """Waits for everything that was recorded or submitted.

        Raises:
            DeviceError: it failed.
            IndexOutOfRangeError: a kernel found an index from data out of range.
        """
        self.transfers.read_status()
        self.queue.wait()

    @property
    def is_lost(self) -> bool:
        """Whether a call raised DeviceLostError. `open_device` gives a new device then.

        With everything that is on it. `find_loss` also finds a loss that no call has met yet.
        """
        return self.backend.lost_cause != ""

    def find_loss(self) -> bool:
        """`is_lost`, after asking the device."""
        return self.backend.find_loss()

    def lost_error(self, subject: str) -> DeviceLostError:
        """The error about something on this device, which is lost."""
        return lost_error(f"{subject} ({self.info.name})", self.backend.lost_cause)

    def close(self) -> None:
        """Waits for the GPU and frees unused memory. `open_device` gives a new device then."""
        if not self.is_closed:
            self.is_closed = True
            if self.is_lost:
                self.abandon()
                return
            try:
                self.synchronize()
            finally:
                self.empty_cache()

    def __repr__(self) -> str:
        return f"Device({self.info.name!r}, {self.info.backend})"


_lock = threading.Lock()
_DeviceKey = tuple[str, int, bool, int]
_devices: dict[_DeviceKey, Device] = {}


def open_device(
    provider: str = "wgpu",
    adapter: int | str | None = None,
    checked: bool = False,
    instance: int = 0,
) -> Device:
    """The device of an adapter; the same object for the same arguments.

    Args:
        provider: ``wgpu`` or ``wgpudawn``.
        adapter: an index into `list_adapters`, a part of a name in any case, or None for the best.
        checked: compile kernels with bounds checks and loop bounding (debugging).
        instance: tells several devices of one adapter apart.

    Raises:
        AdapterError: no such adapter; the message says what to install, or what there is.
        OptionError: the provider has an unknown name.
    """
    info, found = find_adapter(provider, adapter)
    key = provider, info.index, checked, instance
    with _lock:
        device = _devices.get(key)
        if device is None or device.is_closed or device.find_loss():
            lost = device if device is not None and device.is_lost else None
            device = _devices[key] = create_device(provider, info, found, checked)
            device.opened_as = key
        else:
            lost = None
    if lost is not None and not lost._abandoned:
        lost.abandon()
        warnings.warn(
            f"the GPU device {info.name} was lost ({lost.backend.lost_cause}) and is opened again; "
            "models and tensors on the CPU go on, tensors that were on it are gone",
            RuntimeWarning,
            stacklevel=2,
        )
    return device


def device_for(options: CompileOptions) -> Device:
    """The GPU that the options choose. Raises AdapterError when there is none."""
    first = options.first_adapter
    provider = choose_provider(options.provider, first)
    adapter = int(first) if first.isdecimal() else first or None
    return open_device(provider, adapter, options.checked)


def reopened(device: Device) -> Device:
    """The device that `open_device` gives instead of a lost one, with one warning."""
    if device.opened_as is None:
        raise device.lost_error("a device that open_device did not give")
    return open_device(*device.opened_as)


def opened_devices() -> list[Device]:
    """The devices that `open_device` has given and that still work."""
    with _lock:
        return [d for d in _devices.values() if not (d.is_closed or d.is_lost)]


def create_device(provider: str, info: AdapterInfo, adapter: Any, checked: bool) -> Device:
    """A new device. Raises AdapterError if the adapter gives none."""
    try:
        features, cache = info.requested_features, from_environment().cache
        library = open_library(provider, adapter, features, info.limits, checked, cache)
    except Exception as error:
        raise AdapterError(
            f"{info.name} ({info.backend}) does not give a device: {error}; choose another adapter "
            "with TORCH_WEBGPU_ADAPTER or update its driver"
        ) from error
    if info.vendor == "nvidia" and holds_clock():
        nvidia_clock.keep_high(info.name)
    if info.type == "cpu":
        library.awake_seconds = 0.0  # the time of a thread that is awake is taken from the work
    return Device(info, NativeBackend(library), checked)
