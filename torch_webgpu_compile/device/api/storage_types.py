"""``torch.webgpu.FloatStorage`` and the like: storages of one dtype, in older programs."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...torch_private import _dtype_to_storage_type_map, _LegacyStorage


@cache
def storage_type(name: str) -> Any:
    """The class that ``Tensor.storage_type()`` gives, or None if no dtype has such a storage."""
    dtypes = {found: dtype for dtype, found in _dtype_to_storage_type_map().items()}
    if name not in dtypes:
        return None
    # PyTorch reads the device from the module, and both names of the dtype.
    members = {"__module__": "torch.webgpu", "dtype": dtypes[name], "_dtype": dtypes[name]}
    make: Any = type(_LegacyStorage)
    return make(name, (_LegacyStorage,), members)
