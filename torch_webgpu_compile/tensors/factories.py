"""Kernels that make, resize, re-home and view tensors: ``empty``, ``set_``, ``resize_``, views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..runtime.buffers import round_up
from ..symbolic.sizes import storage_span
from ..torch_ops.names import dispatch_name, overload_of
from ..torch_private import (
    _disable_current_modes,
    _dispatch_has_kernel_for_dispatch_key,
    _len_torch_dispatch_stack,
    _storage_Use_Count,
)
from . import determinism, devices
from .deferred import settle
from .storages import CPU_KEYS, buffer_of, given_strides, new_storage, new_tensor

aten = torch.ops.aten
_is_deterministic = determinism.is_on
_set = aten.set_.source_Storage_storage_offset
_VIEWS = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
    "_unsafe_view",
    "alias",
    "detach",
    "view_as_real",
    "view_as_complex",
    "_conj",
    "_neg_view",
    "is_set_to",
)


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Row-major strides, as PyTorch computes them: an empty dimension counts as 1."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _strides(sizes: Sequence[int], memory_format: torch.memory_format | None) -> Sequence[int]:
    """Strides for `new_tensor`."""
    if memory_format is None or memory_format is torch.contiguous_format:
        return ()
    return torch.empty(sizes, device="meta", memory_format=memory_format).stride()


def _check(layout: torch.layout | None, sizes: Sequence[int]) -> None:
    if layout is not None and layout is not torch.strided:
        raise NotImplementedError(
            f"webgpu tensors cannot have the layout {layout}; use a dense tensor (.to_dense())"
        )
    if sizes and min(sizes) < 0:
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(sizes)}: {list(sizes)}"
        )


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """``aten::empty_strided``."""
    if len(size) != len(stride):
        raise RuntimeError(
            f"dimensionality of sizes ({len(size)}) must match dimensionality of strides "
            f"({len(stride)})"
        )
    dtype = dtype or torch.get_default_dtype()
    index = devices.index_of(device)
    strides = given_strides(size, stride)
    span = storage_span(size, strides) if strides else math.prod(size)
    storage = new_storage(span * dtype.itemsize, index)
    made = new_tensor(storage, dtype, size, strides, 0, index)
    return _unwritten(made) if _is_deterministic() else made


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
    _check(layout, size)
    index = devices.index_of(device)
    strides = () if memory_format is None else _strides(size, memory_format)
    storage = new_storage(math.prod(size) * dtype.itemsize, index)
    made = new_tensor(storage, dtype, size, strides, 0, index)
    return _unwritten(made) if _is_deterministic() else made


def _unwritten(tensor: Tensor) -> Tensor:
    """``tensor``, filled with NaN or the largest integer if PyTorch is to do that with new memory.

    Source: ``fill_empty_deterministic_`` of ATen.
    """
    if determinism.fills_empty() and tensor.numel():
        dtype, value = tensor.dtype, math.nan
        if not dtype.is_floating_point and not dtype.is_complex:
            value = True if dtype is torch.bool else torch.iinfo(dtype).max
        # torch.tensor makes a real one also while a mode traces, from which it hides its operators,
        # but not fill_: PyTorch asks the mode for a kernel and finds none.
        with _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext():
            tensor.fill_(value)
    return tensor


def set_(tensor: Tensor) -> Tensor:
    """``aten::set_`` without arguments: gives the tensor an empty storage and shape (0,)."""
    index = tensor.get_device()
    result: Tensor = _set.redispatch(CPU_KEYS, tensor, new_storage(0, index), 0, [0], [1])
    return result


def as_strided_(
    tensor: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """``aten::as_strided_``, as which ``t_``, ``squeeze_`` and their kin come."""
    settle()  # what waits knows the tensor as it was
    result: Tensor = aten.as_strided_.default._handle.redispatch_boxed(
        CPU_KEYS, tensor, size, stride, storage_offset
    )
    return result


def resize_(
    tensor: Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None
) -> Tensor:
    """``aten::resize_``: keeps the storage where it is large enough, and always its contents."""
    if memory_format is torch.preserve_format:
        raise RuntimeError("Unsupported memory format " + str(memory_format))
    _check(None, size)
    if list(tensor.shape) == list(size) and memory_format is None:
        return tensor
    settle()  # what waits knows the tensor as it was
    storage = tensor.untyped_storage()
    written = storage.nbytes() // tensor.element_size()
    offset = int(tensor.storage_offset())
    nbytes = (offset + math.prod(size)) * tensor.element_size()
    if storage.nbytes() < nbytes:
        storage = _grown(tensor, nbytes)
    strides = _strides(size, memory_format)
    result: Tensor = _set.redispatch(CPU_KEYS, tensor, storage, offset, size, strides)
    added = nbytes // tensor.element_size() - written
    if added > 0 and determinism.is_on():
        dtype, index = tensor.dtype, tensor.get_device()
        _unwritten(new_tensor(storage, dtype, [added], [1], written, index))
    return result


def _grown(tensor: Tensor, nbytes: int) -> torch.UntypedStorage:
    """A larger storage with the old one's contents.

    Raises:
        RuntimeError: the old one has other tensors, which could not follow.
    """
    index = tensor.get_device()
    old = tensor.untyped_storage()
    if old.nbytes() and _storage_Use_Count(old._cdata) > _USERS:
        raise RuntimeError(
            f"a webgpu storage of {old.nbytes()} bytes cannot grow to {nbytes} while other tensors "
            "are views of it: they would see nothing of what is written; clone() the tensor before "
            "it is resized, or give an operator an out= of the right size"
        )
    storage = new_storage(nbytes, index)
    if old.nbytes():
        device = devices.get_device(index)
        target = new_tensor(storage, torch.uint8, [nbytes], [1], 0, index)
        # Copies are of whole words, and so is memory.
        device.copy(buffer_of(tensor), 0, buffer_of(target), 0, round_up(old.nbytes(), 4))
    return storage


_USERS = 2  # its tensor, and the object that Python has of it


def view_kernels() -> dict[str, Callable[..., Any]]:
    """View operators, by name: PyTorch's kernels for the CPU only compute sizes and strides."""
    found: dict[str, Callable[..., Any]] = {}
    for name in _VIEWS:
        operator = overload_of(name)
        if _dispatch_has_kernel_for_dispatch_key(dispatch_name(operator), "CPU"):
            found[name] = partial(operator._handle.redispatch_boxed, CPU_KEYS)
    return found
