"""`StepCalls`: PyTorch's operators between the kernels of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..counters import counters
from ..errors import DeviceError
from ..plan.model import HostStep, Plan, view_at
from ..runtime.buffers import AnyBuffer, round_up
from ..runtime.device import Device
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import storage_span
from ..tensors import devices, storages
from ..torch_ops.assertions import ASSERTIONS
from ..torch_ops.dtypes import torch_dtype
from .host_calls import call_overload, check_result, is_collective, laid_out, tensor_of

_ASSERTIONS = frozenset(map(str, ASSERTIONS))


class StepCalls:
    """Runs the host steps of a plan; given to an `Executor` as ``host_call``.

    Those that say ``on_device`` are operators that have an implementation for the device. The
    others run on the CPU.

    Args:
        device: where the plan runs.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan = plan
        self._device = device

    def __call__(
        self,
        step: HostStep,
        memory: Mapping[str, AnyBuffer],
        arrays: Sequence[Any],
        sizes: Mapping[str, int],
    ) -> Sequence[Any]:
        """Runs a step: `launcher.RunHostStep`.

        Raises:
            DeviceError: the device is none of PyTorch's, or the operator gives something else than
                its fake implementation.
            Exception: what the operator raises.
        """
        if step.on_device:
            self._on_device(step, memory, sizes)
            return ()
        return self._on_host(step, arrays, sizes)

    def _on_host(
        self, step: HostStep, arrays: Sequence[Any], sizes: Mapping[str, int]
    ) -> Sequence[Any]:
        """The contents of the results."""
        buffers, remaining = self._plan.buffers, iter(arrays)

        def tensor(argument: HostBuffer) -> Tensor:
            found = tensor_of(buffers[argument.buffer], next(remaining), sizes)
            return laid_out(found, argument.strides, sizes)

        results = call_overload(step, tensor, sizes, len(step.outputs))
        # Only the host can talk to other processes, and raise.
        if not is_collective(step.target) and step.target not in _ASSERTIONS:
            counters.add_fallback(step.target)
        made = []
        for result, name in zip(results, step.outputs, strict=True):
            data = np.zeros(buffers[name].nbytes_for(sizes), np.uint8)
            output = tensor_of(buffers[name], data, sizes)
            check_result(step, result, output)
            if data.size:
                output.copy_(result)
            made.append(data)
        return made

    def _on_device(
        self, step: HostStep, memory: Mapping[str, AnyBuffer], sizes: Mapping[str, int]
    ) -> None:
        """Records what the operator computes behind the commands that came before."""
        index = devices.index_with(self._device)

        def tensor(name: str) -> Tensor:
            place, layout = memory[name], self._plan.buffers[name]
            dtype, (shape, strides, offset) = torch_dtype(layout.dtype), view_at(layout, sizes)
            storage = storages.new_storage(place.memory.nbytes, index, place.memory)
            offset += place.offset_nbytes // dtype.itemsize
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
            self._store(result, output, memory[name])

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
