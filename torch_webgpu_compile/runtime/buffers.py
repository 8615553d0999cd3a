"""GPU memory: a pool of allocations in size buckets.

An `Allocation` is a provider's buffer; a `GpuBuffer` is the loan of one. All work goes through one
queue, in order, so an allocation may be lent again while the GPU still computes with it.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

from ..errors import DeviceError, OutOfMemoryError, human_bytes
from .interface import COPY_DST, COPY_SRC, STORAGE, UNIFORM, Handle
from .native import NativeBackend
from .queue import CommandQueue

STORAGE_USAGE = STORAGE | COPY_SRC | COPY_DST
UNIFORM_USAGE = UNIFORM | COPY_DST
SMALL_USAGE = STORAGE_USAGE | UNIFORM
SMALL_NBYTES = 256
MIN_NBYTES = 16
_FINE_NBYTES = 1 << 20
_IDLE_BATCHES = 256  # submissions, of which a step of a large model makes some tens
_LEAST_SLACK_NBYTES = 8 << 20
_SLACK_SHARE = 1 / 8

_serials = itertools.count(1)
_versions = itertools.count(1)


def round_up(nbytes: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return -(-nbytes // multiple) * multiple


@lru_cache(4096)  # the same sizes come again and again, and this is half of an allocation's time
def bucket_nbytes(nbytes: int) -> int:
    """The size that is allocated for nbytes, a multiple of 16.

    There are eight buckets per power of two, so that it is at most 12.5 % more above 128 bytes; and
    64 above 1 MiB (1.6 %), as a model's memory is in buffers of such sizes.
    """
    steps = 8 if nbytes <= _FINE_NBYTES else 64
    return _rounded(nbytes, steps)


def _rounded(nbytes: int, steps: int) -> int:
    """The next of so many sizes, a power of two, that there are per power of two."""
    nbytes = max(nbytes, MIN_NBYTES)
    step = max(MIN_NBYTES, (1 << (nbytes - 1).bit_length()) // (2 * steps))
    return round_up(nbytes, step)


@lru_cache(4096)
def _larger_buckets(capacity: int) -> tuple[int, ...]:
    """The buckets that may be lent where a bucket has nothing: up to 12.5 % more, least first."""
    found = []
    most = _rounded(capacity, 8)
    while capacity < most:
        capacity = bucket_nbytes(capacity + 1)
        found.append(capacity)
    return tuple(found)


class Allocation:
    """A provider's buffer.

    Attributes:
        serial: never used twice, unlike handles.
        batch: the queue's batch when it was given back.
    """

    __slots__ = ("batch", "capacity", "handle", "serial", "usage")

    def __init__(self, handle: Handle, capacity: int, usage: int) -> None:
        self.handle = handle
        self.capacity = capacity
        self.usage = usage
        self.batch = 0
        self.serial = next(_serials)


_Size = tuple[int, int]  # usage and capacity
_Free = tuple[int, Allocation]  # with its serial, by which heaps are ordered without a call


class GpuBuffer:
    """GPU memory of at least ``nbytes``; goes back to the pool when it is dropped.

    Submitted work is not affected by that.

    Attributes:
        nbytes: as asked for.
        capacity: usable bytes, a multiple of 16.
        handle: the provider's buffer.
        serial: identifies the memory (equal for successive loans of it).
        version: identifies the contents, once somebody has asked for it with `know_version`; 0
            while nobody has. Whoever changes the contents of a buffer that others may hold sets it
            to 0, after the commands that do so have been recorded.
    """

    # Plain slots, not properties: an eager operator reads them several times per call.
    __slots__ = (
        "__weakref__",
        "_pool",
        "capacity",
        "handle",
        "nbytes",
        "serial",
        "version",
    )

    # `BufferPool` sets all of them: an `__init__` would take as long as the rest of an allocation.
    _pool: BufferPool
    capacity: int
    handle: Handle
    nbytes: int
    serial: int
    version: int

    offset_nbytes = 0  # see `BufferSlice`

    def is_of(self, pool: BufferPool) -> bool:
        """Whether the memory is of this pool; False for a `LostBuffer`."""
        return getattr(self, "_pool", None) is pool

    @property
    def memory(self) -> GpuBuffer:
        """Itself: see `BufferSlice`."""
        return self

    def know_version(self) -> None:
        """Gives the contents a version, if they have none, that no others ever have."""
        if not self.version:
            self.version = next(_versions)

    def slice(self, offset_nbytes: int) -> BufferSlice:
        """The part from ``offset_nbytes``, a multiple of `BINDING_ALIGNMENT`, to the end."""
        return BufferSlice(self, offset_nbytes)

    def __repr__(self) -> str:
        return f"GpuBuffer({self.nbytes} bytes, serial {self.serial})"


class LostBuffer(GpuBuffer):
    """Stands for memory that was lost with its device.

    Attributes:
        error: makes the error that every use raises.
    """

    __slots__ = ("error",)

    def __init__(self, error: Callable[[], DeviceError]) -> None:
        self.error = error

    @property
    def memory(self) -> GpuBuffer:
        """Raises the error of every use."""
        raise self.error()

    def __getattr__(self, name: str) -> Any:  # of slots that are not set: all of `GpuBuffer`'s
        if name.startswith("_"):
            raise AttributeError(name)
        raise self.error()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class EmptiedBuffer(LostBuffer):
    """Stands for memory that its owner gave back while tensors are there."""

    __slots__ = ()


class BufferSlice:
    """A part of a `GpuBuffer`, from ``offset_nbytes`` to its end; usable in its place.

    Attributes:
        offset_nbytes: where it starts, a multiple of `BINDING_ALIGNMENT`.
        serial: identifies memory and offset.
    """

    __slots__ = ("buffer", "capacity", "nbytes", "offset_nbytes", "serial")

    def __init__(self, buffer: GpuBuffer, offset_nbytes: int) -> None:
        self.buffer = buffer
        self.offset_nbytes = offset_nbytes
        self.nbytes = buffer.nbytes - offset_nbytes
        self.capacity = buffer.capacity - offset_nbytes
        self.serial: Serial = (buffer.serial, offset_nbytes)

    @property
    def handle(self) -> Handle:
        """The provider's buffer."""
        return self.buffer.handle

    @property
    def memory(self) -> GpuBuffer:
        """The buffer that this is a part of."""
        return self.buffer

    @property
    def version(self) -> Serial:
        """The version of the whole buffer: any change of it counts."""
        version = self.buffer.version
        return version and (version, self.offset_nbytes)


AnyBuffer = GpuBuffer | BufferSlice
Serial = int | tuple[int, int]


class BufferPool:
    """Allocations of one device.

    Ctrl-C may raise after any call. So what belongs together is changed in statements that make no
    call, and a dropped buffer is noticed by C code: a weak reference appends itself to `returned`,
    at any time, also at exit. The next call of a method sorts it in.

    Args:
        backend: creates and frees the memory.
        queue: what pending commands use is not freed, nor lent as idle.
        max_nbytes: the adapter's largest buffer.
        make_room: called once when an allocation fails, before it is tried again.
        describe: what holds the memory, for the error when it fails again.

    Attributes:
        limit_nbytes: what may be reserved; None: as much as the GPU gives.
    """

    def __init__(
        self,
        backend: NativeBackend,
        queue: CommandQueue,
        max_nbytes: int,
        make_room: Callable[[], None],
        describe: Callable[[], str],
    ) -> None:
        self.limit_nbytes: int | None = None
        self._describe = describe
        self._backend = backend
        self._queue = queue
        self._max_nbytes = max_nbytes
        self._make_room = make_room
        self._lock = threading.Lock()
        self.returned: deque[weakref.ref[GpuBuffer]] = deque()
        self._on_drop = self.returned.append
        # Heaps by serial, see `allocate`.
        self._free: defaultdict[_Size, list[_Free]] = defaultdict(list)
        self._lent: dict[weakref.ref[GpuBuffer], Allocation] = {}
        self._allocated = 0
        self._trimmed = 0  # when, in batches
        # Of memory that was freed although it had been used not long ago, by usage and capacity.
        self._evicted: defaultdict[_Size, list[int]] = defaultdict(list)  # when, in batches
        self._missed = 0  # bytes of it that were asked for again
        self._reserved = 0
        self._peak = 0

    def allocate(self, nbytes: int, usage: int = STORAGE_USAGE, is_idle: bool = False) -> GpuBuffer:
        """A buffer with undefined contents.

        Of what is free, that with the lowest serial. So a loop that asks for memory of the same
        sizes in every turn gets the same memory, whatever order it was given back in, and what was
        made for that (bind groups) is used again.

        Args:
            is_idle: no pending command of the queue uses the memory, so that it may be written
                without a flush.

        Raises:
            OutOfMemoryError: the size is beyond the adapter's limit, or there is no memory even
                after the pool was emptied.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}, a size cannot be negative")
        capacity = bucket_nbytes(nbytes)
        if capacity > self._max_nbytes:
            capacity = self._without_slack(nbytes)
        buffer = GpuBuffer()
        buffer.nbytes = nbytes
        loan = weakref.ref(buffer, self._on_drop)
        with self._lock:
            if self.returned:
                self._sort_in()
            free = self._free.get((usage, capacity)) or self._larger(usage, capacity)
            if free:
                position = self._idle(free) if is_idle else 0
                if position is not None:
                    self._lend(buffer, loan, free[position][1], free, position)
                    return buffer
        self._trim(capacity, usage)
        new = self._create(capacity, usage)
        with self._lock:
            self._lend(buffer, loan, new)
        return buffer

    def _without_slack(self, nbytes: int) -> int:
        """The capacity to allocate where the bucket's is too large, else OutOfMemoryError."""
        capacity = round_up(nbytes, MIN_NBYTES)
        if capacity > self._max_nbytes:
            raise OutOfMemoryError(
                f"the GPU is out of memory. A buffer of {nbytes:,} bytes is larger than this GPU "
                f"allows ({self._max_nbytes:,} bytes); split the tensor"
            )
        return capacity

    def _idle(self, free: list[_Free]) -> int | None:
        """The position of one that no pending command uses."""
        sent = math.inf if self._queue.is_empty else self._queue.sent
        return next((k for k, (_, entry) in enumerate(free) if entry.batch < sent), None)

    def _larger(self, usage: int, capacity: int) -> list[_Free] | None:
        """The free buffers of the least larger bucket that is near enough."""
        for larger in _larger_buckets(capacity):
            free = self._free.get((usage, larger))
            if free:
                return free
        return None

    def _lend(
        self,
        buffer: GpuBuffer,
        loan: weakref.ref[GpuBuffer],
        allocation: Allocation,
        free: list[_Free] | None = None,
        position: int = 0,
    ) -> None:
        """Lends an allocation, that at a position in ``free`` or a new one. Its last line calls."""
        if free is None:
            self._reserved += allocation.capacity
        self._lent[loan] = allocation
        self._allocated += allocation.capacity
        if self._allocated > self._peak:
            self._peak = self._allocated
        buffer._pool = self
        buffer.version = 0
        buffer.handle = allocation.handle
        buffer.capacity = allocation.capacity
        buffer.serial = allocation.serial
        if free is not None:
            if position == 0:
                heappop(free)
            else:
                del free[position]
                heapify(free)

    def _create(self, capacity: int, usage: int) -> Allocation:
        return Allocation(self.create(capacity, usage), capacity, usage)

    def create(self, nbytes: int, usage: int) -> Handle:
        """A provider's buffer that does not belong to the pool.

        Not called with the lock held: making room uses this pool and the queue.

        Raises:
            OutOfMemoryError: there is no memory even after all that was free was given back.
        """
        try:
            return self._new(nbytes, usage)
        except OutOfMemoryError:
            self._make_room()
        try:
            return self._new(nbytes, usage)
        except OutOfMemoryError as error:
            stats = self.stats()
            raise OutOfMemoryError(
                f"the GPU is out of memory. {human_bytes(nbytes)} were asked for while "
                f"{human_bytes(stats['allocated'])} are in use and "
                f"{human_bytes(stats['reserved'])} reserved ({self._describe()}); free tensors, "
                "use a smaller batch, or run under torch.no_grad(). The GPU says: "
                f"{error.__cause__ or error}"
            ) from error

    def _new(self, nbytes: int, usage: int) -> Handle:
        limit = self.limit_nbytes
        if limit is not None and self._reserved + nbytes > limit:
            raise OutOfMemoryError(f"more than the limit of {human_bytes(limit)}")
        return self._backend.create_buffer(nbytes, usage)

    def largest(self, count: int) -> list[int]:
        """Bytes of the largest buffers that are lent."""
        with self._lock:
            self._sort_in()
            sizes = [allocation.capacity for allocation in self._lent.values()]
        return sorted(sizes, reverse=True)[:count]

    def _sort_in(self) -> None:
        returned, lent = self.returned, self._lent
        while returned:
            loan = returned[0]
            try:
                allocation = lent[loan]
            except TypeError:  # dropped before it was lent
                del returned[0]
                continue
            free = self._free[allocation.usage, allocation.capacity]
            # From here on without calls but the last, see the class.
            allocation.batch = self._queue.batch
            del returned[0]
            del lent[loan]
            self._allocated -= allocation.capacity
            heappush(free, (allocation.serial, allocation))

    def _trim(self, capacity: int, usage: int) -> None:
        """Frees what is idle longest where a new allocation would make too much of it.

        A cache that grows leaves memory of all its former sizes, which soon is many times its own.
        But a loop needs each size again in its next turn, and of all sizes together it needs more
        than is ever lent at once. So there is room for an eighth more than that, and for what has
        been freed here and was asked for again: a loop finds all of its memory from the third turn.
        """
        sent = self._queue.sent
        if sent - self._trimmed >= _IDLE_BATCHES // 16:
            self._free_old(sent)
        with self._lock:
            batches = self._evicted.get((usage, capacity))
            if batches and batches.pop() >= sent - _IDLE_BATCHES:
                self._missed += capacity
            if batches == []:
                del self._evicted[usage, capacity]
            most = max(self._peak, self._allocated + capacity)
            slack = max(_LEAST_SLACK_NBYTES, int(most * _SLACK_SHARE))
            surplus = self._reserved + capacity - most - slack - self._missed
            if surplus <= 0:
                return
            surplus += slack // 2  # so that not every allocation has to look for it
            freed: list[Allocation] = []
            for entry in self._idle_longest():
                if surplus <= 0 or entry.batch >= sent:  # pending commands use what is left
                    break
                surplus -= entry.capacity
                freed.append(entry)
            self._remove(freed)
            for entry in freed:
                self._evicted[entry.usage, entry.capacity].append(sent)
        self._release(freed)

    def _free_old(self, sent: int) -> None:
        """Frees memory of sizes that have not been asked for in a long time.

        Sizes that change for ever would fill the GPU, and what a provider remembers of a buffer's
        bind groups the host.
        """
        with self._lock:
            self._trimmed = sent
            self._sort_in()
            oldest = sent - _IDLE_BATCHES
            freed = [entry for entry in self._idle_longest() if entry.batch < oldest]
            self._remove(freed)
            self._missed = max(0, self._missed - sum([entry.capacity for entry in freed]))
            for key, batches in list(self._evicted.items()):
                if batches[-1] < oldest:
                    del self._evicted[key]
        self._release(freed)

    def _idle_longest(self) -> list[Allocation]:
        """What is not lent, in the order in which it was given back."""
        free = [entry for entries in self._free.values() for _, entry in entries]
        return sorted(free, key=lambda entry: entry.batch)

    def _remove(self, freed: Sequence[Allocation]) -> None:
        """Takes some of what is not lent out of the pool."""
        gone = {entry.serial for entry in freed}
        kept: defaultdict[_Size, list[_Free]] = defaultdict(list)
        for key, free in self._free.items():
            left = [entry for entry in free if entry[0] not in gone]
            if left:
                kept[key] = sorted(left)
        nbytes = sum([entry.capacity for entry in freed])
        self._free, self._reserved = kept, self._reserved - nbytes

    def empty(self) -> None:
        """Frees all memory that is not lent, after submitting the commands that may use it."""
        with self._lock:
            self._sort_in()
            freed = self._idle_longest()
            self._remove(freed)
        try:
            self._queue.flush()
        finally:
            self._release(freed)

    def _release(self, allocations: Sequence[Allocation]) -> None:
        for allocation in allocations:
            self._backend.destroy_buffer(allocation.handle)

    def abandon(self) -> None:
        """`empty` of a lost device: nothing is submitted."""
        self._queue.abandon()
        self.empty()

    def stats(self) -> dict[str, int]:
        """Bytes: ``allocated`` (lent), ``reserved`` (lent or kept), ``peak_allocated``."""
        with self._lock:
            self._sort_in()
            return {
                "allocated": self._allocated,
                "reserved": self._reserved,
                "peak_allocated": self._peak,
            }

    def blocks(self) -> list[tuple[int, int, int | None]]:
        """(serial, bytes, bytes that were asked for) of all memory; None where it is not lent."""
        with self._lock:
            self._sort_in()
            lent = [(loan(), allocation) for loan, allocation in self._lent.items()]
            free = [entry for entries in self._free.values() for _, entry in entries]
        found: list[tuple[int, int, int | None]] = [
            (allocation.serial, allocation.capacity, 0 if buffer is None else buffer.nbytes)
            for buffer, allocation in lent
        ]
        return sorted(found + [(entry.serial, entry.capacity, None) for entry in free])

    def reset_peak(self) -> None:
        """Starts ``peak_allocated`` again from what is allocated now."""
        with self._lock:
            self._sort_in()
            self._peak = self._allocated
