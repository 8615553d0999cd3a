"""GPU copies of parameters and buffers that live on the CPU.

A copy is made once and again only after the memory behind the tensor has changed. PyTorch counts
in-place operators and whatever else goes through its dispatcher (the tensor's version). It does not
count fused optimizers, operators on ``.data``, collectives, what other processes do to shared
memory, and NumPy: these are noticed by a few words of each tensor that are compared at each call
(`fingerprints`). One such change makes all tensors of that kind in a graph suspect (trained ones,
frozen ones, buffers), as an optimizer leaves most rows of an embedding as they were; they are all
copied again. Fused optimizers are watched besides. What may go unseen is an
uncounted change of a few elements.

Copies belong to storages, not to tensors: tensors that share memory share its copy, and nothing is
attached to a tensor that ``torch.utils.swap_tensors`` would refuse.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..counters import counters
from ..errors import DeviceError
from ..runtime.device import Device, GpuBuffer, unless_held
from ..symbolic.sizes import are_alike, storage_span
from ..torch_private import TensorBase, is_traceable_wrapper_subclass
from . import fingerprints
from .signature import InputRecipe

data_ptr: Callable[[Tensor], int] = TensorBase.data_ptr
_get_version: Callable[[Tensor], int] = TensorBase._version.__get__  # type: ignore[attr-defined]
_storage_of: Callable[[Tensor], torch.UntypedStorage] = TensorBase.untyped_storage


def same_layout(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether ``tensor`` has these strides where they matter (sizes other than 1)."""
    own = tensor.stride()
    return own == strides or are_alike(tensor.shape, own, strides)


def with_layout(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``tensor`` itself, or a copy of it with these strides."""
    if same_layout(tensor, strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


# ---- the copies of one device


class StaticCopy:
    """The GPU's copy of one view of a storage.

    Attributes:
        address, words: where the memory is, and which of its words may be compared.
        identity, version: of the tensor that it was last copied from or known to be equal to; None
            if it has to be copied again.
        seen: all of these words then.
    """

    __slots__ = ("address", "buffer", "identity", "seen", "version", "words")

    def __init__(self, buffer: GpuBuffer) -> None:
        self.buffer = buffer
        self.address = -1
        self.words = fingerprints.joined(())
        self.identity = 0
        self.version: int | None = None
        self.seen = b""


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
        self.copies: dict[_View, StaticCopy] = {}
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
        self._users: tuple[weakref.WeakMethod[Callable[[], None]], ...] = ()
        self.generation = self.invalidation = next(_generations)
        self.lock = threading.RLock()
        device.add_reclaimable(self)
        device.add_holder(self)

    def held(self) -> tuple[str, int]:
        """(a name of the copies, their bytes): for messages about memory that ran out."""
        storages = tuple(self._storages.values())
        return "copies of CPU parameters", sum(storage.nbytes for storage in storages)

    def add_user(self, forget: Callable[[], None]) -> None:
        """``forget``, a method, will be called (while its object is alive) when a storage dies.

        It drops references to buffers of storages that have died. It is called by finalisers, in
        any thread and at any point of a program, so it must not take locks or wait.
        """
        with self.lock:
            alive = tuple(reference for reference in self._users if reference() is not None)
            self._users = (*alive, weakref.WeakMethod(forget))

    def copy_of(self, tensor: Tensor, strides: tuple[int, ...]) -> StaticCopy:
        """The copy that is laid out with ``strides`` (in elements), perhaps to be filled first."""
        storage = self._storage(_storage_of(tensor))
        sizes, own = tensor.shape, tensor.stride()
        itemsize = tensor.element_size()
        view = (tensor.storage_offset(), sizes, own, itemsize, strides)
        copy = storage.copies.get(view)
        if copy is None:
            nbytes = storage_span(sizes, strides) * itemsize
            storage.nbytes += nbytes
            if storage.copies and storage.nbytes > storage.most:
                storage.copies.clear()
                storage.nbytes = nbytes
                self._forget()
            copy = storage.copies[view] = StaticCopy(self._device.allocate(nbytes))
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
        unless_held(self.lock, self._storages.clear, self._forget)

    def _drop(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        # Runs in the middle of anything: no lock, only atomic operations.
        storage = self._storages.get(key)
        if storage is not None and storage.reference is reference:
            self._storages.pop(key, None)
            self._forget()

    def _forget(self) -> None:
        self.generation = next(_generations)
        for reference in self._users:
            forget = reference()
            if forget is not None:
                forget()

    def upload(self, tensor: Tensor, strides: tuple[int, ...], buffer: GpuBuffer) -> None:
        """Copies a CPU tensor, laid out in ``strides``, to ``buffer``."""
        source = with_layout(tensor, strides)
        nbytes = storage_span(source.shape, source.stride()) * source.element_size()
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


# ---- the copies that one graph takes


class StaticCopies:
    """Up-to-date copies of some tensors, in the order of ``layouts``: what one graph takes.

    Make it for tensors whose addresses it will meet again, then ask `are_current` and `update` at
    each call. Not safe to be called from two threads at once.

    Args:
        owner: whose copies they are.
        tensors: on the CPU.
        layouts: how a plan wants each of them.

    Attributes:
        addresses: of the tensors.
        buffers: the copies, as long as they are current.
    """

    def __init__(
        self, owner: StaticBuffers, tensors: Sequence[Tensor], layouts: Sequence[InputRecipe]
    ) -> None:
        self._owner = owner
        self._layouts = layouts
        self._counted = tuple([layout.counted for layout in layouts])
        self._count = any(self._counted)
        self._copies: list[StaticCopy] = []
        self._words = fingerprints.joined(())
        self._bounds: list[tuple[int, int]] = []
        self._identities: tuple[int, ...] = ()
        self._versions: tuple[int, ...] | None = None
        self._seen = b""
        self._generation = self._invalidation = -1
        self.addresses = tuple(map(data_ptr, tensors))
        self.buffers: list[GpuBuffer] = []

    def are_current(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the buffers still hold what the tensors hold; these have the same addresses."""
        expected = self._versions
        if expected is not None and self._count:
            expected = tuple(map(int.__add__, expected, self._counted))
        if (
            expected is None
            or self._generation != self._owner.generation
            or self._invalidation != self._owner.invalidation
            or self._identities != tuple(map(id, tensors))
            or expected != _versions(tensors)
            or (self._seen and self._seen != fingerprints.read(self._words))
        ):
            return False
        self._versions = expected
        return True

    def update(self, tensors: Sequence[Tensor]) -> None:
        """Copies the tensors whose contents have changed.

        Raises:
            DeviceError: the device refused, or a tensor's memory was freed by a resize.
            OutOfMemoryError: the copies do not fit.
        """
        self._versions = None
        with self._owner.lock:
            generation, self._invalidation = self._owner.generation, self._owner.invalidation
            if self._generation != generation:
                self._take(tensors)
                self._generation = generation  # meanwhile more may have been dropped
            # Read before anything is copied: a change meanwhile is seen by the next call.
            self._seen = fingerprints.read(self._words)
            versions = _versions(tensors)
            stale = self._stale(tensors, versions)
            for k in stale:
                self._copies[k].version = None
            seen = _seen([self._copies[k] for k in stale])
            for k in stale:
                self._owner.upload(tensors[k], self._layouts[k].strides, self._copies[k].buffer)
            self.buffers = [copy.buffer for copy in self._copies]
            self._know(tensors, versions, seen)

    def replace(self, tensors: Sequence[Tensor], buffers: Sequence[GpuBuffer | None]) -> None:
        """Takes these buffers as the copies of tensors that a graph has changed, all of them.

        A tensor with None is copied again when it is next needed.
        """
        self._versions = None
        with self._owner.lock:
            self._seen = fingerprints.read(self._words)
            for copy, buffer in zip(self._copies, buffers, strict=True):
                copy.buffer = copy.buffer if buffer is None else buffer
            self.buffers = [copy.buffer for copy in self._copies]
            self._know(tensors, _versions(tensors), _seen(self._copies))
            for copy, buffer in zip(self._copies, buffers, strict=True):
                if buffer is None:
                    copy.version = self._versions = None

    def _take(self, tensors: Sequence[Tensor]) -> None:
        """The copies of the tensors as they are now, some of them new."""
        copies = [
            self._owner.copy_of(tensor, layout.strides)
            for tensor, layout in zip(tensors, self._layouts, strict=True)
        ]
        if copies != self._copies or self.addresses != tuple(map(data_ptr, tensors)):
            most = fingerprints.words_of_each(len(copies))
            self._words = fingerprints.joined([copy.words[:most] for copy in copies])
            end, self._bounds = 0, []
            for copy in copies:
                start, end = end, end + 4 * min(most, len(copy.words))
                self._bounds.append((start, end))
            self.addresses = tuple(map(data_ptr, tensors))
            self._copies = copies  # last: an interrupt before it makes the next call do all again

    def _stale(self, tensors: Sequence[Tensor], versions: tuple[int, ...] | None) -> list[int]:
        """Positions of the tensors that have to be copied, those of shared copies once."""
        if versions is None:
            return list({id(copy): k for k, copy in enumerate(self._copies)}.values())
        stale: dict[int, int] = {}
        suspect: set[tuple[bool, bool]] = set()
        data = self._seen
        for k, copy in enumerate(self._copies):
            if (
                copy.version is None
                or copy.version + self._counted[k] != versions[k]
                or copy.identity != id(tensors[k])
            ):
                stale[id(copy)] = k
                continue
            start, end = self._bounds[k]
            if not copy.seen.startswith(data[start:end]):
                stale[id(copy)] = k
                suspect.add(_kind(tensors[k]))
        if suspect:
            for k, (tensor, copy) in enumerate(zip(tensors, self._copies, strict=True)):
                if _kind(tensor) in suspect:
                    stale.setdefault(id(copy), k)
        return list(stale.values())

    def _know(
        self,
        tensors: Sequence[Tensor],
        versions: tuple[int, ...] | None,
        seen: dict[int, bytes],
    ) -> None:
        """Notes that the copies are current; the new ones are as of when ``seen`` was read."""
        self._identities = tuple(map(id, tensors))
        for k, copy in enumerate(self._copies):
            copy.identity = self._identities[k]
            copy.version = None if versions is None else versions[k]
            copy.seen = seen.get(id(copy), copy.seen)
        self._versions = versions  # last: with it the rest counts


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Equal for tensors that the same code is likely to change: trained, frozen, or buffers."""
    return tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def _seen(copies: Sequence[StaticCopy]) -> dict[int, bytes]:
    """All words of each copy's tensor, by the copy's id."""
    data = fingerprints.read(fingerprints.joined([copy.words for copy in copies]))
    found, end = {}, 0
    for copy in copies:
        start, end = end, end + 4 * len(copy.words)
        found[id(copy)] = data[start:end]
    return found


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The version counters; None where a tensor has none, as inference tensors."""
    try:
        return tuple(map(_get_version, tensors))
    except RuntimeError:
        return None


# ---- changes that neither version counters nor compared words show


def invalidate(tensor: Tensor | None = None) -> None:
    """Makes the next use of ``tensor`` (None: of every tensor) copy it to the GPU again.

    Needed only after a change of a few elements that PyTorch does not count, as through
    ``tensor.data`` or NumPy. Tensors that share memory with it, as ``tensor.data`` does, are meant
    as well. A tensor without a copy on the GPU needs none of this and is accepted.

    Raises:
        TypeError: it is not a dense tensor.
    """
    if tensor is not None and not (isinstance(tensor, Tensor) and tensor.layout is torch.strided):
        raise TypeError(
            f"invalidate() takes a dense tensor, not {getattr(tensor, 'layout', type(tensor))}; "
            "pass the parameter whose memory was changed, or nothing for all of them"
        )
    _invalidate_everywhere(None if tensor is None else _with_memory(tensor))


def _invalidate_everywhere(tensors: list[Tensor] | None) -> None:
    with _lock:
        stores = list(_by_device.values())
    for store in stores:
        store.invalidate(tensors)


def _with_memory(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of a tensor: itself, or the tensors that a subclass wraps."""
    if type(tensor) is torch.nn.Parameter or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _with_memory(getattr(tensor, name))]


@cache
def watch_optimizers() -> None:
    """Lets fused optimizers say what they have changed, as their kernels do not count it.

    Of an embedding they may change so few rows that no word that is compared is among them.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ..torch_private import skip_code

    if skip_code is not None:
        skip_code(_stepped.__code__)
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():  # a step within a graph is that graph's: it counts
        return
    fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
    changed = [param for params in fused for param in params if param.is_cpu]
    if changed:
        _invalidate_everywhere([part for param in changed for part in _with_memory(param)])
