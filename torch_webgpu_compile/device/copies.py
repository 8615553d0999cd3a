"""Kernels that copy: ``copy_``, and reading a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..copying import copy_between_devices, copy_bytes, is_here, to_host
from ..storages import CPU_KEYS
from .dispatch import run

_copy = torch.ops.aten.copy_.default
_to_copy = torch.ops.aten._to_copy.default


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::copy_``: converts and broadcasts; within a device without passing the host."""
    if is_here(target) and is_here(source) and target.get_device() == source.get_device():
        if not copy_bytes(source, target):
            run(_copy, target, source)
    else:
        copy_between_devices(source, target)
    return target


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
    result: Tensor = _to_copy.redispatch(
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


def local_scalar_dense(tensor: Tensor) -> Any:
    """``aten::_local_scalar_dense``: waits for the value of a tensor of one element."""
    return to_host(tensor).item()


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """``aten::_pin_memory``: WebGPU has no pinned memory; transfers stage on their own."""
    return tensor
