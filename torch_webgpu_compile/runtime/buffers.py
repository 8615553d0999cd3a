"""GPU memory: a pool of allocations in size buckets.

An `Allocation` is a provider's buffer; a `GpuBuffer` is the loan of one. All work goes through one
queue, in order, so an allocation may be lent again while the GPU still computes with it.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from ..errors import DeviceError, OutOfMemoryError
from .interface import COPY_DST, COPY_SRC, STORAGE, UNIFORM, Backend, Handle

STORAGE_USAGE = STORAGE | COPY_SRC | COPY_DST
UNIFORM_USAGE = UNIFORM | COPY_DST
MIN_NBYTES = 16

_serials = itertools.count(1)


def round_up(nbytes: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


def bucket_nbytes(nbytes: int) -> int:
    """The size that is allocated for nbytes: a multiple of 16, at most 12.5 % more above 128 bytes.

    There are eight buckets per power of two.
    """
    nbytes = max(nbytes, MIN_NBYTES)
    step = max(MIN_NBYTES, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return round_up(nbytes, step)


class Allocation:
    """A provider's buffer. ``serial`` is never used twice, unlike handles."""

    __slots__ = ("capacity", "handle", "serial", "usage")

    def __init__(self, handle: Handle, capacity: int, usage: int) -> None:
        self.handle = handle
        self.capacity = capacity
        self.usage = usage
        self.serial = next(_serials)


class GpuBuffer:
    """GPU memory of at least ``nbytes``; goes back to the pool on `release` or when it is dropped.

    Attributes:
        nbytes: as asked for.
        serial: identifies the memory (equal for successive loans of it); 0 after `release`.
    """

    __slots__ = ("__weakref__", "_allocation", "_pool", "nbytes", "serial")

    def __init__(self, pool: BufferPool, allocation: Allocation, nbytes: int) -> None:
        self._pool = pool
        self._allocation: Allocation | None = allocation
        self.nbytes = nbytes
        self.serial = allocation.serial

    @property
    def allocation(self) -> Allocation:
        """The memory. Raises DeviceError after `release`."""
        if self._allocation is None:
            raise DeviceError(
                f"a GPU buffer of {self.nbytes} bytes was used after it was released; keep the "
                "tensor that owns it alive"
            )
        return self._allocation

    @property
    def handle(self) -> Handle:
        """The provider's buffer. Raises DeviceError after `release`."""
        return self.allocation.handle

    @property
    def capacity(self) -> int:
        """Usable bytes, a multiple of 16."""
        return self.allocation.capacity

    @property
    def is_released(self) -> bool:
        """Whether the memory went back to the pool."""
        return self._allocation is None

    def release(self) -> None:
        """Returns the memory to the pool; later uses raise. Submitted work is not affected."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            self.serial = 0
            self._pool.give_back(allocation)

    def __del__(self) -> None:
        allocation = getattr(self, "_allocation", None)
        if allocation is not None:
            self._allocation = None
            self._pool.give_back(allocation)

    def __repr__(self) -> str:
        state = "released" if self._allocation is None else f"serial {self.serial}"
        return f"GpuBuffer({self.nbytes} bytes, {state})"


class BufferPool:
    """Allocations of one device.

    Args:
        backend: creates and frees the memory.
        max_nbytes: the adapter's largest buffer.
        make_room: called once when an allocation fails, before it is tried again.
    """

    def __init__(self, backend: Backend, max_nbytes: int, make_room: Callable[[], None]) -> None:
        self._backend = backend
        self._max_nbytes = max_nbytes
        self._make_room = make_room
        self._lock = threading.RLock()
        self._free: dict[tuple[int, int], list[Allocation]] = {}
        # A garbage collection may drop a buffer in the middle of any method here: returned memory
        # is only queued, and sorted in by the next call.
        self._returned: deque[Allocation] = deque()
        # Keeps lent allocations reachable: else a collected cycle would finalise a wgpu-py object
        # together with the `GpuBuffer` that returns it here.
        self._lent: dict[int, Allocation] = {}
        self._allocated = 0
        self._reserved = 0
        self._peak = 0

    def allocate(self, nbytes: int, usage: int = STORAGE_USAGE) -> GpuBuffer:
        """A buffer with undefined contents.

        Raises:
            OutOfMemoryError: the size is beyond the adapter's limit, or there is no memory even
                after the pool was emptied.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}, a size cannot be negative")
        capacity = bucket_nbytes(nbytes)
        if capacity > self._max_nbytes:
            capacity = round_up(max(nbytes, MIN_NBYTES), MIN_NBYTES)  # without the bucket's slack
        if capacity > self._max_nbytes:
            raise OutOfMemoryError(
                f"a buffer of {nbytes:,} bytes is larger than this GPU allows "
                f"({self._max_nbytes:,} bytes); split the tensor"
            )
        with self._lock:
            self._sort_in()
            free = self._free.get((usage, capacity))
            allocation = free.pop() if free else self._create(capacity, usage)
            self._lent[allocation.serial] = allocation
            self._allocated += capacity
            self._peak = max(self._peak, self._allocated)
        return GpuBuffer(self, allocation, nbytes)

    def _create(self, capacity: int, usage: int) -> Allocation:
        try:
            handle = self._backend.create_buffer(capacity, usage)
        except OutOfMemoryError:
            self._make_room()
            try:
                handle = self._backend.create_buffer(capacity, usage)
            except OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"the GPU is out of memory: {capacity:,} bytes were asked for while "
                    f"{self._allocated:,} bytes are in use and {self._reserved:,} are reserved "
                    f"({error}); free tensors or use a smaller batch"
                ) from error
        self._reserved += capacity
        return Allocation(handle, capacity, usage)

    def give_back(self, allocation: Allocation) -> None:
        """Takes memory back. Never blocks, so it may be called from a finaliser."""
        self._returned.append(allocation)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            try:
                allocation = self._returned.popleft()
            except IndexError:
                return
            del self._lent[allocation.serial]
            self._allocated -= allocation.capacity
            key = allocation.usage, allocation.capacity
            self._free.setdefault(key, []).append(allocation)

    def empty(self) -> None:
        """Frees all memory that is not lent."""
        with self._lock:
            self._sort_in()
            for allocations in self._free.values():
                for allocation in allocations:
                    self._backend.release_buffer(allocation.handle)
                    self._reserved -= allocation.capacity
            self._free.clear()

    def stats(self) -> dict[str, int]:
        """Bytes: ``allocated`` (lent), ``reserved`` (lent or kept), ``peak_allocated``."""
        with self._lock:
            self._sort_in()
            return {
                "allocated": self._allocated,
                "reserved": self._reserved,
                "peak_allocated": self._peak,
            }

    def reset_peak(self) -> None:
        """Starts ``peak_allocated`` again from what is allocated now."""
        with self._lock:
            self._sort_in()
            self._peak = self._allocated
