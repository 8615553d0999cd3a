"""``webgpu`` tensors that hold what CPU parameters hold, for graphs in several parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..device import devices
from ..device.tensors import copying, storages
from ..runtime.device import Device, GpuBuffer
from ..symbolic.sizes import storage_span
from .static_copies import StaticCopies, data_ptr, static_buffers, watch_optimizers

_MOST_TAKEN = 8  # sets of tensors of one graph: a block that several layers share has one of each


@dataclass(frozen=True)
class _Layout:
    """See `static_copies.Layout`."""

    strides: tuple[int, ...]
    counted: int = 0


@dataclass
class _Taken:
    copies: StaticCopies
    found: list[tuple[GpuBuffer, int]] = field(default_factory=list)  # buffers and contents
    tensors: list[Tensor] = field(default_factory=list)


class StaticTensors:
    """Where a graph of CPU tensors works whose parts are graphs of ``webgpu`` tensors.

    Attributes:
        device: that of its tensors.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device(devices.NAME, index)
        self._index = index
        self._lock = threading.Lock()
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
        found = list(tensors)
        kept = [k for k, tensor in enumerate(tensors) if _may_be_kept(tensor)]
        if kept:
            with self._lock:
                made = self._copied([tensors[k] for k in kept])
            for k, tensor in zip(kept, made, strict=True):
                found[k] = tensor
        return [tensor.to(self.device) for tensor in found]

    def on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU tensors of the contents and strides of tensors of the device, with one wait.

        Raises:
            DeviceError: pending commands were refused, or the device is lost.
        """
        return copying.all_to_host(tensors)

    def _copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._gpu is not (device := devices.get_device(self._index)):  # opened again
            self._open(device)
        layouts = [_Layout(tensor.stride()) for tensor in tensors]
        key = tuple((data_ptr(t), t.shape, t.stride(), t.dtype) for t in tensors)
        all_taken = self._taken
        taken = all_taken.get(key)
        if taken is None:
            taken = all_taken[key] = _Taken(StaticCopies(self._static, tensors, layouts))
            if len(all_taken) > _MOST_TAKEN:
                all_taken.popitem(last=False)
        all_taken.move_to_end(key)
        if not taken.copies.are_current(tensors):
            taken.copies.update(tensors)
            self._follow(taken, tensors)
        return list(taken.tensors)

    def _follow(self, taken: _Taken, tensors: Sequence[Tensor]) -> None:
        """Makes tensors of the copies, or says which of them have changed."""
        found = list(zip(taken.copies.buffers, taken.copies.contents, strict=True))
        made: list[Tensor] = []
        for k, (tensor, (buffer, contents)) in enumerate(zip(tensors, found, strict=True)):
            known = taken.found[k] if taken.found else None
            if known is None or known[0] is not buffer:
                made.append(self._tensor(tensor, buffer))
                continue
            if known[1] != contents:
                torch.autograd.graph.increment_version(taken.tensors[k])
            made.append(taken.tensors[k])
        taken.tensors, taken.found = made, found

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
