"""Kernels that make, resize and re-home tensors: ``empty``, ``set_``, ``resize_`` and their kin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..storages import CPU_KEYS, buffer_of, new_storage, new_tensor, span

aten = torch.ops.aten
_set = aten.set_.source_Storage_storage_offset


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Row-major strides, as PyTorch computes them: an empty dimension counts as 1."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _strides(sizes: Sequence[int], memory_format: torch.memory_format | None) -> Sequence[int]:
    if memory_format is None or memory_format is torch.contiguous_format:
        return contiguous_strides(sizes)
    return torch.empty(sizes, device="meta", memory_format=memory_format).stride()


def _check(dtype: torch.dtype, layout: torch.layout | None, sizes: Sequence[int]) -> None:
    if layout is not None and layout is not torch.strided:
        raise NotImplementedError(
            f"webgpu tensors cannot have the layout {layout}; use a dense tensor (.to_dense())"
        )
    if any(size < 0 for size in sizes):
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(sizes)}: {list(sizes)}"
        )
    if dtype.is_floating_point and dtype.itemsize == 1:
        return  # storage only: every operator on float8 runs on the host


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """``aten::empty_strided``."""
    dtype = dtype or torch.get_default_dtype()
    index = devices.index_of(device)
    storage = new_storage(span(size, stride) * dtype.itemsize, index)
    return new_tensor(storage, dtype, size, stride, 0, index)


def empty(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """``aten::empty.memory_format``."""
    dtype = dtype or torch.get_default_dtype()
    _check(dtype, layout, size)
    index = devices.index_of(device)
    storage = new_storage(math.prod(size) * dtype.itemsize, index)
    return new_tensor(storage, dtype, size, _strides(size, memory_format), 0, index)


def set_(tensor: Tensor) -> Tensor:
    """``aten::set_``: an empty storage."""
    index = tensor.get_device()
    result: Tensor = _set.redispatch(CPU_KEYS, tensor, new_storage(0, index), 0, [0], [1])
    return result


def resize_(
    tensor: Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None
) -> Tensor:
    """``aten::resize_``: keeps the storage where it is large enough, and always its contents."""
    if memory_format is torch.preserve_format:
        raise RuntimeError("Unsupported memory format " + str(memory_format))
    _check(tensor.dtype, None, size)
    if list(tensor.shape) == list(size) and memory_format is None:
        return tensor
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    nbytes = (offset + math.prod(size)) * tensor.element_size()
    if storage.nbytes() < nbytes:
        storage = _grown(tensor, nbytes)
    strides = _strides(size, memory_format)
    result: Tensor = _set.redispatch(CPU_KEYS, tensor, storage, offset, size, strides)
    return result


def _grown(tensor: Tensor, nbytes: int) -> torch.UntypedStorage:
    """A larger storage with the old one's contents."""
    index = tensor.get_device()
    old = tensor.untyped_storage()
    storage = new_storage(nbytes, index)
    if old.nbytes():
        device = devices.get_device(index)
        target = new_tensor(storage, torch.uint8, [nbytes], [1], 0, index)
        device.copy(buffer_of(tensor), 0, buffer_of(target), 0, old.nbytes())
    return storage


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """``UntypedStorage.resize_`` on the device is not possible from Python."""
    raise NotImplementedError(
        "a webgpu storage cannot be resized in place: use tensor.resize_() instead"
    )
