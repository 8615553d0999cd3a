"""Kernels that copy: ``copy_``, and reading a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...tensors.aliasing import check_copy
from ...tensors.copying import copy_between_devices, copy_bytes, is_here, to_device, to_host
from ...tensors.devices import index_of
from ...tensors.storages import CPU_KEYS, new_storage, new_tensor
from ...torch_private import _neg_view
from .dispatch import run

_parameters: Any = torch.nn.parameter
_WITHOUT_SIZES: type = _parameters.UninitializedTensorMixin
_copy = torch.ops.aten.copy_.default
_to_copy = torch.ops.aten._to_copy.default
_clone = torch.ops.aten.clone.default
_ROW_MAJOR = (None, torch.preserve_format, torch.contiguous_format)  # of what is contiguous

# Dtypes without kernels, and those of which kernels do not keep the bits of each NaN.
_MOVED_AS = {
    torch.float64: torch.int64,
    torch.complex64: torch.int64,
    torch.complex32: torch.int32,
    torch.uint64: torch.int64,
    torch.uint16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def copy_(target: Tensor, source: Tensor | complex, non_blocking: bool = False) -> Tensor:
    """``aten::copy_``: converts and broadcasts; within a device without passing the host."""
    if not isinstance(source, Tensor):
        source = _of_number(source)
    if not source.numel() and isinstance(source, _WITHOUT_SIZES):
        return target  # of a lazy module: nothing is in it, and asking for its shape raises
    if not is_here(target):
        copy_between_devices(source, target)
    elif target.is_conj():
        copy_(target.conj(), source.conj())
    elif target.is_neg():
        copy_(_neg_view(target), _neg_view(source))
    elif target.get_device() == source.get_device() and is_here(source):
        check_copy(source, target)
        _copy_here(target, source)
    else:
        copy_between_devices(source, target)
    return target


def _copy_here(target: Tensor, source: Tensor) -> None:
    if not copy_bytes(source, target):
        run(_copy, *_movable(target, source))


def _of_number(number: complex) -> Tensor:
    """The tensor that a number was: PyTorch's bindings take numbers, and kernels get them back."""
    wide = torch.complex128 if isinstance(number, complex) else torch.float64
    dtype = None if isinstance(number, int) else wide
    return torch.tensor(number, dtype=dtype, device="cpu")


def _movable(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The operands as integers of the same size, where a copy only moves elements."""
    dtype = _MOVED_AS.get(target.dtype)
    if source.dtype is not target.dtype or source.is_conj() or source.is_neg():
        return target, source  # the target is neither
    if target.dtype is torch.complex128:
        return _movable(torch.view_as_real(target), torch.view_as_real(source))
    if dtype is None:
        return target, source
    return _bits(target, dtype), _bits(source, dtype)


def _bits(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    index, storage = tensor.get_device(), tensor.untyped_storage()
    return new_tensor(
        storage, dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), index
    )


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::_copy_from``: what ``copy_`` to another kind of device calls."""
    return copy_(target, source)


def to_copy(
    tensor: Tensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """``aten::_to_copy``; always blocking, as PyTorch would otherwise ask for pinned memory."""
    converted = dtype is not None and dtype is not tensor.dtype
    if (
        device is not None
        and not converted
        and memory_format is None
        and not pin_memory
        and tensor.numel()  # 0 also of a lazy module's, whose shape nobody may ask for
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    ):
        # What the composite kernel comes to, in half of its time.
        if device.type == "cpu":
            return to_host(tensor)
        if tensor.is_cpu:
            return to_device(tensor, index_of(device))
    result: Tensor
    is_staying = is_here(tensor) and (device is None or device == tensor.device)
    if converted and is_staying and memory_format is None:
        result = run(_to_copy, tensor, dtype=dtype)  # in one step
        return result
    result = _to_copy.redispatch(
        CPU_KEYS,
        tensor,
        dtype=dtype,
        layout=layout,
        device=device,
        pin_memory=False,
        non_blocking=False,
        memory_format=memory_format,
    )
    return result


def clone(tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """``aten::clone``. What is contiguous after it is one step, and not two operators."""
    result: Tensor
    if tensor.numel() and not (tensor.is_conj() or tensor.is_neg()):
        if tensor.is_contiguous():
            if memory_format in _ROW_MAJOR:
                nbytes, index = tensor.numel() * tensor.element_size(), tensor.get_device()
                strides = () if memory_format is torch.contiguous_format else tensor.stride()
                storage = new_storage(nbytes, index)
                result = new_tensor(storage, tensor.dtype, tensor.shape, strides, 0, index)
                _copy_here(result, tensor)
                return result
        elif memory_format is torch.contiguous_format and not (
            tensor.dtype in _MOVED_AS or tensor.is_complex()
        ):
            result = run(_clone, tensor, memory_format=memory_format)
            return result
    result = _clone.redispatch(CPU_KEYS, tensor, memory_format=memory_format)
    return result


def local_scalar_dense(tensor: Tensor) -> Any:
    """``aten::_local_scalar_dense``: waits for the value of a tensor of one element."""
    return to_host(tensor).item()
