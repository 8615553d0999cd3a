"""Runs `HostStep`s on tensors of the device: operators that have an implementation for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import DeviceError
from ..plan.model import HostStep, Plan, view_at
from ..runtime.buffers import AnyBuffer, round_up
from ..runtime.device import Device
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import storage_span
from ..tensors import devices, storages
from ..torch_ops.dtypes import torch_dtype
from .host_calls import call_overload, check_result, laid_out


class DeviceCalls:
    """Runs the steps of a plan that say ``on_device``; given to an `Executor` as ``device_call``.

    Args:
        device: where the plan runs.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan = plan
        self._device = device

    def __call__(
        self, step: HostStep, buffer: Callable[[str], AnyBuffer], sizes: Mapping[str, int]
    ) -> None:
        """Runs a step; what it computes is recorded behind the commands that came before.

        Args:
            buffer: gives the memory of the plan's buffers.
            sizes: the values of the plan's size symbols.

        Raises:
            DeviceError: the plan's device is none of PyTorch's, or the operator gives something
                else than its fake implementation.
            Exception: what the operator raises.
        """
        index = devices.index_with(self._device)

        def tensor(name: str) -> Tensor:
            memory, layout = buffer(name), self._plan.buffers[name]
            dtype, (shape, strides, offset) = torch_dtype(layout.dtype), view_at(layout, sizes)
            storage = storages.new_storage(memory.memory.nbytes, index, memory.memory)
            offset += memory.offset_nbytes // dtype.itemsize
            return storages.new_tensor(storage, dtype, shape, strides, offset, index)

        outputs = [tensor(name) for name in step.outputs]
        first = len(outputs) - len(step.changed)
        places = iter(outputs[first:])

        def changed(given: HostBuffer) -> Tensor:
            return laid_out(next(places).copy_(tensor(given.buffer)), given.strides, sizes)

        def argument(given: HostBuffer) -> Tensor:
            return laid_out(tensor(given.buffer), given.strides, sizes)

        before = devices.set_current(index)
        try:
            made = call_overload(step, argument, sizes, len(outputs), changed)
        finally:
            devices.set_current(before)
        for result, output, name in zip(made, outputs, step.outputs, strict=True):
            if result.device != output.device:
                raise DeviceError(
                    f"{step.target} gave a tensor on {result.device} for arguments on "
                    f"{output.device}; its implementation has to give one there"
                )
            check_result(step, result, output)
            self._store(result, output, buffer(name))

    def _store(self, result: Tensor, output: Tensor, place: AnyBuffer) -> None:
        """Copies a result to its place, unless it is there.

        ``output`` is only its layout: what an operator writes to a whole storage gets new memory.
        """
        if not result.numel():
            return
        itemsize = output.element_size()
        start = int(result.storage_offset()) * itemsize
        if result.stride() != output.stride() or start % 4 or result.is_conj() or result.is_neg():
            result, start = torch.empty_like(output).copy_(result), 0
        source = storages.buffer_of(result)
        if source is not place.memory:
            nbytes = round_up(storage_span(output.shape, output.stride()) * itemsize, 4)
            offset = int(output.storage_offset()) * itemsize
            self._device.copy(source, start, place.memory, offset, nbytes)
