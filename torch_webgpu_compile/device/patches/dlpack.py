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

from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from ...tensors import devices
from ..import_hooks import around


@around("torch._tensor:Tensor.__dlpack_device__")
def dlpack_device(original: Any, self: Tensor) -> Any:
    if self.device.type != devices.NAME or has_torch_function_unary(self):
        return original(self)
    return torch.utils.dlpack.DLDeviceType.kDLExtDev, devices.index_of(self.device)


@around("torch._C:_from_dlpack")
def from_dlpack(make: Any, capsule: Any) -> Tensor:
    found: Tensor = make(capsule)
    return _in_its_storage(found) if found.device.type == devices.NAME else found


def _in_its_storage(tensor: Tensor) -> Tensor:
    """The same elements as a tensor over the storage that they were made in."""
    # Not at the top: `import torch` does this.
    from ...tensors.storages import memory_in, slots_of, tensor_at

    address = tensor.data_ptr()
    (memory,) = memory_in(slots_of([address]))
    if memory is None:
        return tensor
    index = devices.index_of(tensor.device)
    return tensor_at(memory, tensor.dtype, address, tensor.shape, tensor.stride(), index)
