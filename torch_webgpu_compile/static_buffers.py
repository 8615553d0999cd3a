"""GPU copies of parameters and buffers that live on the CPU.

A copy is made once and again only after the tensor has changed. A change is noticed by the tensor's
version counter or its address: in-place operators, optimizers, ``load_state_dict`` and assignments
to ``.data`` are seen. In-place operators on ``.data`` and on NumPy views do not count versions (a
property of PyTorch); call `invalidate` after those.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .counters import counters
from .runtime.device import Device, GpuBuffer

data_ptr: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
_get_version: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]

_UNVERSIONED = -1


def version(tensor: Tensor) -> int:
    """The tensor's version counter; -1 for an inference tensor, which has none."""
    try:
        return _get_version(tensor)
    except RuntimeError:
        return _UNVERSIONED


def state_of(tensors: Sequence[Tensor]) -> Any:
    """Equal to an earlier result only if the tensors hold what they held then.

    That is while all of those tensors live: an address may be used again. None when it cannot be
    known, as for inference tensors.
    """
    try:
        return (*map(data_ptr, tensors), *map(_get_version, tensors))
    except RuntimeError:
        return None


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in sizes:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether ``tensor`` has these strides where they matter (sizes other than 1)."""
    own = tensor.stride()
    return own == strides or all(
        a == b or n <= 1 for n, a, b in zip(tensor.shape, own, strides, strict=True)
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
        """Called when a tensor has died, from anywhere: must not block."""


class _Entry:
    __slots__ = ("address", "buffer", "reference", "version")

    def __init__(
        self, reference: weakref.ref[Tensor], buffer: GpuBuffer, address: int, version: int
    ) -> None:
        self.reference = reference
        self.buffer = buffer
        self.address = address
        self.version = version


Key = tuple[int, tuple[int, ...]]


class StaticBuffers:
    """The copies on one device. Use `static_buffers`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._entries: dict[Key, _Entry] = {}
        self._users: tuple[weakref.ref[User], ...] = ()
        self._lock = threading.RLock()
        device.add_holder(self)

    def held(self) -> tuple[str, int]:
        """The copies."""
        entries = tuple(self._entries.values())
        return "copies of CPU parameters", sum(entry.buffer.nbytes for entry in entries)

    def add_user(self, user: User) -> None:
        """``user.forget`` will be called (while it is alive) when a tensor dies."""
        with self._lock:
            alive = tuple(reference for reference in self._users if reference() is not None)
            self._users = (*alive, weakref.ref(user))

    def get(self, tensor: Tensor, strides: tuple[int, ...], counted: int = 0) -> GpuBuffer:
        """An up-to-date copy, laid out with ``strides`` (in elements).

        ``counted`` version increments since the last use are known not to be changes.
        """
        key = (id(tensor), strides)
        address, now = data_ptr(tensor), version(tensor)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.reference() is not tensor:
                entry = None
            if entry is None:
                nbytes = span(tensor.shape, strides) * tensor.element_size()
                buffer = self._device.allocate(nbytes)
                self._upload(tensor, strides, buffer)
                self._store(key, tensor, buffer, address, now)
                return buffer
            expected = entry.version + counted
            if entry.version == _UNVERSIONED or expected != now or entry.address != address:
                # The same memory again: commands already submitted were ordered before the upload.
                self._upload(tensor, strides, entry.buffer)
                entry.address = address
            entry.version = now
            return entry.buffer

    def replace(self, tensor: Tensor, strides: tuple[int, ...], buffer: GpuBuffer) -> None:
        """``buffer`` is known to hold what ``tensor`` holds now."""
        with self._lock:
            key = (id(tensor), strides)
            self._store(key, tensor, buffer, data_ptr(tensor), version(tensor))

    def invalidate(self, tensor: Tensor | None = None) -> None:
        """Makes the next use copy ``tensor`` (None: every tensor) again."""
        with self._lock:
            for (identity, _), entry in list(self._entries.items()):
                if tensor is None or identity == id(tensor):
                    entry.version = _UNVERSIONED
            self._forget()

    def _store(self, key: Key, tensor: Tensor, buffer: GpuBuffer, address: int, now: int) -> None:
        itself = weakref.ref(self)

        def died(reference: weakref.ref[Tensor]) -> None:
            owner = itself()
            if owner is not None:
                owner._drop(key, reference)

        self._entries[key] = _Entry(weakref.ref(tensor, died), buffer, address, now)

    def _drop(self, key: Key, reference: weakref.ref[Tensor]) -> None:
        # Runs in the middle of anything: no lock, only atomic operations.
        entry = self._entries.get(key)
        if entry is not None and entry.reference is reference:
            self._entries.pop(key, None)
            self._forget()

    def _forget(self) -> None:
        for reference in self._users:
            user = reference()
            if user is not None:
                user.forget()

    def _upload(self, tensor: Tensor, strides: tuple[int, ...], buffer: GpuBuffer) -> None:
        source = with_layout(tensor, strides)
        nbytes = span(source.shape, source.stride()) * source.element_size()
        self._device.upload(buffer, (data_ptr(source), nbytes))
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


def invalidate(tensor: Tensor | None = None) -> None:
    """Makes the next use of ``tensor`` (None: of every tensor) copy it to the GPU again.

    Needed only after a change that PyTorch does not count, as through ``tensor.data`` or NumPy.
    """
    with _lock:
        stores = list(_by_device.values())
    for store in stores:
        store.invalidate(tensor)
