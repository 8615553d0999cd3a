"""`PlanHost`: what PyTorch does for a composed plan: its operators, seeds, and unusual layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..counters import counters
from ..dtypes import DType
from ..errors import DeviceError
from ..plan.model import HostStep, Plan
from ..runtime.composed import GpuTensor, Value
from ..runtime.device import Device
from ..symbolic.nested import HostBuffer
from ..symbolic.sizes import may_overlap, storage_span
from ..tensors import devices, storages
from ..torch_ops.dtypes import dtype_of, torch_dtype
from .host_calls import called, is_collective
from .step_calls import StepCalls


class PlanHost:
    """See `runtime.composed.Host`.

    Operators that have an implementation for the device run on it, if PyTorch knows the device; the
    others run on copies in host memory.

    Args:
        device: where the plan runs.
        draw: gives seeds.
    """

    def __init__(self, device: Device, draw: Callable[[int], bytes]) -> None:
        self._device = device
        self.seeds = draw

    def calls_of(self, plan: Plan) -> StepCalls:
        """What runs the host steps of a nested plan."""
        return StepCalls(plan, self._device)

    def run(self, step: HostStep, values: Mapping[str, Any]) -> Sequence[Value]:
        """The results of a host step."""
        index = self._index() if step.on_device else None

        def tensor(buffer: HostBuffer) -> Tensor:
            return self._tensor(values[buffer.buffer], index)

        if index is None:
            results, _ = called(step, tensor, values)
            if not is_collective(step.target):
                counters.add_fallback(step.target)
        else:
            before = devices.set_current(index)
            try:
                results, _ = called(step, tensor, values)
            finally:
                devices.set_current(before)
        if len(results) != len(step.outputs):
            raise DeviceError(
                f"{step.target} gave {len(results)} results, not the {len(step.outputs)} of its "
                "fake implementation (register_fake); make them agree"
            )
        return [self._value(value) for value in results]

    def laid_out(self, tensor: GpuTensor, dtype: DType, strides: tuple[int, ...]) -> GpuTensor:
        """A copy of a tensor in another layout, or of another dtype, at the start of memory."""
        given, wanted = self._tensor(tensor, self._index()), torch_dtype(dtype)
        with torch.no_grad():
            if may_overlap(tensor.shape, strides):
                if tensor.strides != strides:
                    raise DeviceError(f"a tensor of strides {tensor.strides} is not {strides}")
                flat = given.as_strided((storage_span(tensor.shape, strides),), (1,))
                made = flat.to(wanted, copy=True).as_strided(tensor.shape, strides)
            else:
                made = given.new_empty_strided(tensor.shape, strides, dtype=wanted).copy_(given)
        found: GpuTensor = self._value(made)
        return found

    def _index(self) -> int | None:
        """The device's number in PyTorch, if it has one."""
        try:
            return devices.index_with(self._device)
        except DeviceError:
            return None

    def _tensor(self, value: GpuTensor, index: int | None) -> Tensor:
        """A tensor on the device, or its copy in host memory."""
        dtype = torch_dtype(value.dtype)
        if index is not None:
            storage = storages.new_storage(value.memory.nbytes, index, value.memory)
            layout = value.shape, value.strides, value.offset
            return storages.new_tensor(storage, dtype, *layout, index)
        if not value.span:
            return torch.empty_strided(value.shape, value.strides, dtype=dtype)
        data = np.empty(value.span, np.uint8)
        address = data.__array_interface__["data"][0]
        self._device.download_many([(value.memory, value.offset_nbytes, value.span, address)])
        counters.add(bytes_downloaded=value.span)
        return torch.frombuffer(data, dtype=dtype).as_strided(value.shape, value.strides)

    def _value(self, value: Any) -> Any:
        """A result as the plan's tensor, or the number that it is."""
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach().resolve_conj().resolve_neg()
        dtype = dtype_of(tensor.dtype)
        if dtype is None:
            raise DeviceError(f"a plan cannot go on with a tensor of {tensor.dtype}")
        sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
        nbytes = storage_span(sizes, strides) * dtype.itemsize
        if not nbytes:
            return GpuTensor(self._device.allocate(0), dtype, sizes, strides)
        if tensor.device.type == devices.NAME:
            start = storages.offset_at(storages.data_ptr(tensor)) // dtype.itemsize
            return GpuTensor(storages.buffer_of(tensor), dtype, sizes, strides, start)
        counters.add(bytes_uploaded=nbytes)
        memory = self._device.upload_new((tensor.data_ptr(), nbytes))
        return GpuTensor(memory, dtype, sizes, strides)
