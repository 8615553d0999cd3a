"""`Copies`: GPU copies of a list of CPU tensors, and whether the tensors still hold the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..runtime.device import GpuBuffer
from . import fingerprints

if TYPE_CHECKING:
    from .static_buffers import StaticBuffers

data_ptr: Callable[[Tensor], int] = torch._C.TensorBase.data_ptr
_get_version: Callable[[Tensor], int] = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The version counters; None where a tensor has none, as inference tensors."""
    try:
        return tuple(map(_get_version, tensors))
    except RuntimeError:
        return None


class Layout(Protocol):
    """How a plan wants a tensor: see `signature.StaticRecipe`."""

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def counted(self) -> int:
        """Version increments since the last call that are known not to be changes."""


class Copy:
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


class Copies:
    """Up-to-date copies of some tensors, in the order of ``layouts``: what one graph takes.

    Make it for tensors whose addresses it will meet again, then ask `are_current` and `update` at
    each call. Not safe to be called from two threads at once.

    Args:
        owner: whose copies they are.
        tensors: on the CPU.
        layouts: how each of them is wanted.

    Attributes:
        addresses: of the tensors.
        buffers: the copies, as long as they are current.
    """

    def __init__(
        self, owner: StaticBuffers, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> None:
        self._owner = owner
        self._layouts = layouts
        self._counted = tuple([layout.counted for layout in layouts])
        self._count = any(self._counted)
        self._copies: list[Copy] = []
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
        """Copies what has changed.

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
        """What the tensors hold after a graph has changed them all is in these buffers.

        A tensor with None is copied again when it is next needed.
        """
        self._versions = None
        with self._owner.lock:
            self._seen = fingerprints.read(self._words)
            for copy, buffer in zip(self._copies, buffers, strict=True):
                copy.buffer = copy.buffer if buffer is None else buffer
            self.buffers = [copy.buffer for copy in self._copies]
            self._know(tensors, _versions(tensors), _seen(self._copies))
            if None in buffers:
                self._versions = None
                for copy, buffer in zip(self._copies, buffers, strict=True):
                    copy.version = None if buffer is None else copy.version

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
        """The copies hold what the tensors held; those that are new do since ``seen`` was read."""
        self._identities = tuple(map(id, tensors))
        for k, copy in enumerate(self._copies):
            copy.identity = self._identities[k]
            copy.version = None if versions is None else versions[k]
            copy.seen = seen.get(id(copy), copy.seen)
        self._versions = versions  # last: with it the rest counts


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    """Equal for tensors that the same code is likely to change: trained, frozen, or buffers."""
    return tensor.requires_grad, isinstance(tensor, torch.nn.Parameter)


def _seen(copies: Sequence[Copy]) -> dict[int, bytes]:
    """All words of each copy's tensor, by the copy's id."""
    data = fingerprints.read(fingerprints.joined([copy.words for copy in copies]))
    found, end = {}, 0
    for copy in copies:
        start, end = end, end + 4 * len(copy.words)
        found[id(copy)] = data[start:end]
    return found
