"""DLPack between PyTorch tensors on the device, which other libraries do not know.

Patched: ``torch.Tensor.__dlpack_device__`` and ``torch._C._from_dlpack``; for other devices they
do what they did.

Why: PyTorch's capsules name the device as DLPack's "extension device", but the method looks for the
name "privateuse1", which every such device has replaced by its own. And the tensor of a capsule
gets a storage that begins at the tensor: an in-place operation that gives all of a storage other
memory would take that from under the others that share it.

Until: the method asks for PyTorch's name of the device; and for a storage, until storages of a
device in Python can give their memory to another.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from .. import devices


def install() -> None:
    """Replaces both."""
    make, device_of = torch._C._from_dlpack, Tensor.__dlpack_device__

    @functools.wraps(device_of)
    def dlpack_device(self: Tensor) -> Any:
        if self.device.type != devices.NAME or has_torch_function_unary(self):
            return device_of(self)
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, devices.index_of(self.device)

    @functools.wraps(make)
    def from_dlpack(capsule: Any) -> Tensor:
        found: Tensor = make(capsule)
        return _in_its_storage(found) if found.device.type == devices.NAME else found

    Tensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]
    torch._C._from_dlpack = from_dlpack  # type: ignore[assignment]


def _in_its_storage(tensor: Tensor) -> Tensor:
    """The same elements as a tensor over the storage that they were made in."""
    from ..tensors.storages import (
        memory_in,
        slots_of,
        tensor_at,
    )  # not at the top: `import torch` does this

    address = tensor.data_ptr()
    (memory,) = memory_in(slots_of([address]))
    if memory is None:
        return tensor
    index = devices.index_of(tensor.device)
    return tensor_at(memory, tensor.dtype, address, tensor.shape, tensor.stride(), index)
