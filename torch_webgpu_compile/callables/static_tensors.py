"""``webgpu`` tensors that hold what CPU parameters hold, for graphs in several parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from ..device import devices
from ..device.tensors import copying, storages
from ..runtime.device import Device, GpuBuffer
from ..symbolic.sizes import storage_span
from ..torch_private import TensorBase
from .static_copies import StaticCopies, data_ptr, static_buffers, watch_optimizers

_Tensor = TensorBase
# What a copy depends on but for the contents: calls ask all tensors for one after the other.
_PROPERTIES: tuple[Callable[[Tensor], object], ...] = (
    *(data_ptr, type, attrgetter("shape"), _Tensor.stride, attrgetter("dtype")),
    *(_Tensor.is_conj, _Tensor.is_neg),
)
_MOST_TAKEN = 64  # sets of tensors of one graph: a block that several layers share has one of each


@dataclass(frozen=True)
class _Layout:
    """See `static_copies.WantedLayout`."""

    strides: tuple[int, ...]
    counted: int


@dataclass
class _Taken:
    """Device tensors that a graph uses, for one set of the addresses of their sources.

    Attributes:
        kept: positions of the tensors that have copies.
        tensors: on the GPU, over the memory of the copies.
        contents: `StaticCopies.contents` when the tensors were last made to follow the copies.
        follows: whether they do; not if a call was interrupted before.
    """

    copies: StaticCopies
    kept: list[int]
    tensors: list[Tensor] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    follows: bool = False

    def among(self, count: int) -> list[Tensor | None]:
        """The tensors, at their positions among ``count``."""
        found: list[Tensor | None] = [None] * count
        for position, tensor in zip(self.kept, self.tensors, strict=True):
            found[position] = tensor
        return found


class StaticTensors:
    """Device tensors of CPU parameters, for graphs whose parts are graphs of ``webgpu`` tensors.

    It may be used from several threads.

    Attributes:
        device: that of its tensors.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device(devices.NAME, index)
        self._index = index
        self._lock = threading.Lock()
        self._turn = threading.RLock()
        self._taken: OrderedDict[tuple[object, ...], _Taken] = OrderedDict()
        self._open(devices.get_device(index))
        watch_optimizers()

    def _open(self, device: Device) -> None:
        self._gpu = device
        self._static = static_buffers(device)
        self._static.add_user(self)
        self.forget()

    def forget(self) -> None:
        """Drops the references to GPU copies; the next call looks them up again."""
        self._taken = OrderedDict()

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Tensors of equal contents and strides, for a graph that only reads them.

        They are the same ones again, with another version after a change of what they hold. None
        for a tensor whose memory has gaps, or that is lazily conjugated or negated.

        Raises:
            DeviceError: the device refused, or a tensor's memory was freed by a resize.
            OutOfMemoryError: the copies do not fit.
        """
        taken, _ = self._copied(tensors, (False,) * len(tensors))
        return taken.among(len(tensors))

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU tensors of the contents and strides of tensors of the device, with one wait.

        Raises:
            DeviceError: pending commands were refused, or the device is lost.
        """
        return copying.all_to_host(tensors)

    @contextmanager
    def changing(
        self, tensors: Sequence[Tensor], counted: Sequence[bool]
    ) -> Iterator[list[Tensor | None]]:
        """Like `of`, for a graph that writes the tensors.

        When it ends without an error, ``tensors`` have been given what these hold, and the next
        call need not copy them; after an error it does. Such calls take turns.

        Args:
            counted: whether each tensor's version counter is incremented before each call for what
                the call changes.

        Raises:
            DeviceError, OutOfMemoryError: as `of` does.
        """
        with self._turn:
            taken, kept = self._copied(tensors, tuple(counted))
            try:
                yield taken.among(len(tensors))
                with self._lock:
                    taken.copies.replace(kept, list(map(storages.buffer_of, taken.tensors)))
                    taken.contents = taken.copies.contents
            except BaseException:
                self._static.invalidate(kept)
                raise

    def _copied(
        self, tensors: Sequence[Tensor], counted: tuple[bool, ...]
    ) -> tuple[_Taken, list[Tensor]]:
        """Lasting copies that are up to date, and the tensors that have one."""
        with self._lock:
            if self._gpu is not (device := devices.get_device(self._index)):  # opened again
                self._open(device)
            all_taken = self._taken
            key = counted, *(tuple(map(get, tensors)) for get in _PROPERTIES)
            taken = all_taken.get(key)
            if taken is None:
                taken = all_taken[key] = self._take(tensors, counted)
                if len(all_taken) > _MOST_TAKEN:
                    all_taken.popitem(last=False)
            all_taken.move_to_end(key)
            kept = [tensors[k] for k in taken.kept]
            if not (taken.follows and taken.copies.are_current(kept)):
                taken.follows = False
                taken.copies.update(kept)
                self._follow(taken, kept)
            return taken, kept

    def _take(self, tensors: Sequence[Tensor], counted: Sequence[bool]) -> _Taken:
        kept = [k for k, tensor in enumerate(tensors) if _may_be_kept(tensor)]
        layouts = [_Layout(tensors[k].stride(), int(counted[k])) for k in kept]
        return _Taken(StaticCopies(self._static, [tensors[k] for k in kept], layouts), kept)

    def _follow(self, taken: _Taken, tensors: Sequence[Tensor]) -> None:
        """Makes tensors of the copies, or says which of them have changed."""
        contents = taken.copies.contents
        for k, (tensor, buffer) in enumerate(zip(tensors, taken.copies.buffers, strict=True)):
            if k == len(taken.tensors):
                taken.tensors.append(self._tensor(tensor, buffer))
            elif storages.buffer_of(taken.tensors[k]) is not buffer:
                taken.tensors[k] = self._tensor(tensor, buffer)
            elif taken.contents[k : k + 1] != contents[k : k + 1]:
                torch.autograd.graph.increment_version(taken.tensors[k])
        taken.contents = contents
        taken.follows = True

    def _tensor(self, tensor: Tensor, buffer: GpuBuffer) -> Tensor:
        sizes, strides = tensor.shape, tensor.stride()
        nbytes = storage_span(sizes, strides) * tensor.element_size()
        storage = storages.new_storage(nbytes, self._index, buffer)
        return storages.new_tensor(storage, tensor.dtype, sizes, strides, index=self._index)


def _may_be_kept(tensor: Tensor) -> bool:
    """Whether a copy of its memory is a tensor like it."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg())
        and storage_span(tensor.shape, tensor.stride()) <= tensor.numel()
    )
