"""GPU copies of parameters and buffers that live on the CPU.

A copy is made once and again only after the memory behind the tensor has changed. PyTorch counts
in-place operators and whatever else goes through its dispatcher (the tensor's version). It does not
count fused optimizers, operators on ``.data``, collectives, what other processes do to shared
memory, and NumPy: these are noticed by a few words of each tensor that are compared at each call
(`fingerprints`). One such change makes all tensors of that kind in a graph suspect (trained ones,
frozen ones, buffers), as an optimizer leaves most rows of an embedding as they were; they are all
copied again. Fused optimizers are watched besides (`invalidation`). What may go unseen is an
uncounted change of a few elements.

Copies belong to storages, not to tensors: tensors that share memory share its copy, and nothing is
attached to a tensor that ``torch.utils.swap_tensors`` would refuse.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..counters import counters
from ..errors import DeviceError
from ..runtime.device import Device, GpuBuffer
from . import fingerprints
from .static_copies import Copy, data_ptr

_storage_of: Callable[[Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether ``tensor`` has these strides where they matter (sizes other than 1)."""
    own, sizes = tensor.stride(), tensor.shape
    return (
        own == strides
        or 0 in sizes
        or all(a == b or n == 1 for n, a, b in zip(sizes, own, strides, strict=True))
    )


def with_layout(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``tensor`` itself, or a copy of it with these strides."""
    if same_layout(tensor, strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


class User(Protocol):
    """Holds on to buffers of a `StaticBuffers`."""

    def forget(self) -> None:
        """Drops the references to buffers of storages that have died.

        It is called by finalisers, in any thread and at any point of a program, so it must not take
        locks or wait.
        """


_View = tuple[Any, ...]


class _Storage:
    """The copies of a storage, by view.

    Attributes:
        nbytes: of all of them.
        most: when there are more than so many bytes, all are dropped: a weight may be wanted in
            several layouts, but windows that move through a buffer are another matter.
    """

    __slots__ = ("copies", "most", "nbytes", "reference")

    def __init__(self, reference: weakref.ref[torch.UntypedStorage], nbytes: int) -> None:
        self.reference = reference
        self.copies: dict[_View, Copy] = {}
        self.nbytes = 0
        self.most = 4 * max(nbytes, 1 << 18)


_generations = itertools.count()


class StaticBuffers:
    """The copies on one device. Use `static_buffers`.

    Attributes:
        lock: held while copies are looked up, made and changed.
        generation: another one after copies were dropped.
        invalidation: another one after tensors have to be copied again.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._storages: dict[int, _Storage] = {}
        self._users: tuple[weakref.ref[User], ...] = ()
        self.generation = self.invalidation = next(_generations)
        self.lock = threading.RLock()
        device.add_reclaimable(self)
        device.add_holder(self)

    def held(self) -> tuple[str, int]:
        """(what the copies are, their bytes): for messages about memory that ran out."""
        storages = tuple(self._storages.values())
        return "copies of CPU parameters", sum(storage.nbytes for storage in storages)

    def add_user(self, user: User) -> None:
        """``user.forget`` will be called (while it is alive) when a storage dies."""
        with self.lock:
            alive = tuple(reference for reference in self._users if reference() is not None)
            self._users = (*alive, weakref.ref(user))

    def copy_of(self, tensor: Tensor, strides: tuple[int, ...]) -> Copy:
        """The copy that is laid out with ``strides`` (in elements), perhaps to be filled first."""
        storage = self._storage(_storage_of(tensor))
        sizes, own = tensor.shape, tensor.stride()
        itemsize = tensor.element_size()
        view = (tensor.storage_offset(), sizes, own, itemsize, strides)
        copy = storage.copies.get(view)
        if copy is None:
            nbytes = span(sizes, strides) * itemsize
            storage.nbytes += nbytes
            if storage.copies and storage.nbytes > storage.most:
                storage.copies.clear()
                storage.nbytes = nbytes
                self._forget()
            copy = storage.copies[view] = Copy(self._device.allocate(nbytes))
        address = data_ptr(tensor)
        if copy.address != address:
            if copy.address != -1:  # resized: who looks at the old address has to take it again
                self.generation = next(_generations)
            copy.address, copy.version = address, None
            copy.words = fingerprints.positions(address, sizes, own, itemsize)
        return copy

    def _storage(self, storage: torch.UntypedStorage) -> _Storage:
        key = id(storage)
        found = self._storages.get(key)
        if found is None or found.reference() is not storage:
            itself = weakref.ref(self)

            def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
                owner = itself()
                if owner is not None:
                    owner._drop(key, reference)

            found = self._storages[key] = _Storage(weakref.ref(storage, died), storage.nbytes())
        return found

    def invalidate(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Makes the next use copy these tensors, and what shares memory with them, again.

        None: every tensor.
        """
        with self.lock:
            if tensors is None:
                found = list(self._storages.values())
            else:
                keys = {id(_storage_of(tensor)) for tensor in tensors}
                found = [self._storages[key] for key in keys if key in self._storages]
            for storage in found:
                for copy in storage.copies.values():
                    copy.version = None
            self.invalidation = next(_generations)

    def reclaim(self) -> None:
        """Lets go of all copies (`Device.empty_cache`); what a call under way uses stays."""
        if self.lock.acquire(blocking=False):  # else another thread is making some
            try:
                self._storages.clear()
                self._forget()
            finally:
                self.lock.release()

    def _drop(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # Runs in the middle of anything: no lock, only atomic operations.
        storage = self._storages.get(key)
        if storage is not None and storage.reference is reference:
            self._storages.pop(key, None)
            self._forget()

    def _forget(self) -> None:
        self.generation = next(_generations)
        for reference in self._users:
            user = reference()
            if user is not None:
                user.forget()

    def upload(self, tensor: Tensor, strides: tuple[int, ...], buffer: GpuBuffer) -> None:
        """Copies a CPU tensor, laid out in ``strides``, to ``buffer``."""
        source = with_layout(tensor, strides)
        nbytes = span(source.shape, source.stride()) * source.element_size()
        address = data_ptr(source)
        if nbytes and not address:
            raise DeviceError(
                f"a parameter of shape {tuple(tensor.shape)} has no memory: its storage was "
                "resized to 0 bytes (as FSDP does between uses); restore it before the call"
            )
        self._device.upload(buffer, (address, nbytes))
        counters.add(bytes_uploaded=nbytes)


_lock = threading.Lock()
_by_device: weakref.WeakKeyDictionary[Device, StaticBuffers] = weakref.WeakKeyDictionary()


def static_buffers(device: Device) -> StaticBuffers:
    """The process's copies on ``device``."""
    with _lock:
        found = _by_device.get(device)
        if found is None:
            found = _by_device[device] = StaticBuffers(device)
        return found


def drop(device: Device) -> None:
    """Forgets the copies on a lost device."""
    with _lock:
        _by_device.pop(device, None)


def invalidate(tensors: list[Tensor] | None) -> None:
    """`StaticBuffers.invalidate` on every device."""
    with _lock:
        stores = list(_by_device.values())
    for store in stores:
        store.invalidate(tensors)
