"""``webgpu`` tensors that hold what CPU parameters hold, for graphs in several parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device import devices
from ..device.tensors import storages
from ..runtime.device import Device, GpuBuffer
from ..symbolic.sizes import storage_span
from .static_copies import StaticCopies, data_ptr, static_buffers, watch_optimizers

_MOST_TAKEN = 64  # sets of tensors of one graph: a block that several layers share has one of each


@dataclass(frozen=True)
class _Layout:
    """See `static_copies.Layout`."""

    strides: tuple[int, ...]
    counted: int


@dataclass
class _Taken:
    """What a graph has taken of tensors of the same addresses.

    Attributes:
        tensors: on the GPU, over the memory of the copies.
        contents: `StaticCopies.contents` when the tensors were last made to follow the copies.
        follows: whether they do; not if a call was interrupted before.
    """

    copies: StaticCopies
    tensors: list[Tensor] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    follows: bool = False


class StaticTensors:
    """Where a graph of CPU tensors works whose parts are graphs of ``webgpu`` tensors.

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

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of equal contents and strides, for a graph that only reads them.

        They are the same ones again, with another version after a change of what they hold.

        Raises:
            DeviceError: the device refused, or a tensor's memory was freed by a resize.
            OutOfMemoryError: the copies do not fit.
        """
        kept = [tensor for tensor in tensors if _may_be_kept(tensor)]
        taken = self._copied(kept, [False] * len(kept))
        return self._among(tensors, kept, taken)

    @contextmanager
    def changing(
        self, tensors: Sequence[Tensor], counted: Sequence[bool]
    ) -> Iterator[list[Tensor]]:
        """Tensors of equal contents and strides, for a graph that writes them.

        When it ends without an error, ``tensors`` have been given what these hold, and the next
        call need not copy them; after an error it does. Such calls take turns.

        Args:
            counted: whether each tensor's version counter is incremented before each call for what
                the call changes.

        Raises:
            DeviceError, OutOfMemoryError: as `of` does.
        """
        pairs = [pair for pair in zip(tensors, counted, strict=True) if _may_be_kept(pair[0])]
        kept = [tensor for tensor, _ in pairs]
        with self._turn:
            taken = self._copied(kept, [is_counted for _, is_counted in pairs])
            try:
                yield self._among(tensors, kept, taken)
                with self._lock:
                    buffers = list(map(storages.buffer_of, taken.tensors))
                    taken.copies.replace(kept, buffers)
                    taken.contents = taken.copies.contents
            except BaseException:
                self._static.invalidate(kept)
                raise

    def _among(
        self, tensors: Sequence[Tensor], kept: Sequence[Tensor], taken: _Taken
    ) -> list[Tensor]:
        """The copies of ``tensors``, of some of which, ``kept``, there are lasting ones."""
        lasting = dict(zip(map(id, kept), taken.tensors, strict=True))
        return [
            tensor.to(self.device) if (copy := lasting.get(id(tensor))) is None else copy
            for tensor in tensors
        ]

    def _copied(self, tensors: Sequence[Tensor], counted: Sequence[bool]) -> _Taken:
        """Lasting copies that are up to date."""
        with self._lock:
            if self._gpu is not (device := devices.get_device(self._index)):  # opened again
                self._open(device)
            key = tuple(
                (data_ptr(tensor), tensor.shape, tensor.stride(), tensor.dtype, is_counted)
                for tensor, is_counted in zip(tensors, counted, strict=True)
            )
            all_taken = self._taken
            taken = all_taken.get(key)
            if taken is None:
                layouts = [_Layout(entry[2], int(entry[4])) for entry in key]
                taken = all_taken[key] = _Taken(StaticCopies(self._static, tensors, layouts))
                if len(all_taken) > _MOST_TAKEN:
                    all_taken.popitem(last=False)
            all_taken.move_to_end(key)
            if not (taken.follows and taken.copies.are_current(tensors)):
                taken.follows = False
                taken.copies.update(tensors)
                self._follow(taken, tensors)
            return taken

    def _follow(self, taken: _Taken, tensors: Sequence[Tensor]) -> None:
        """Makes tensors of the copies, or says which of them have changed."""
        contents = taken.copies.contents
        for k, (tensor, buffer) in enumerate(zip(tensors, taken.copies.buffers, strict=True)):
            if k == len(taken.contents):
                taken.tensors.append(self._tensor(tensor, buffer))
                taken.contents.append(contents[k])
            elif storages.buffer_of(taken.tensors[k]) is not buffer:
                taken.tensors[k] = self._tensor(tensor, buffer)
            elif taken.contents[k] != contents[k]:
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
        and storages.is_dense(tensor)
    )
