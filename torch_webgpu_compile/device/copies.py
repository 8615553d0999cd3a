"""Kernels that copy: ``copy_``, and reading a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..copying import copy_between_devices, copy_bytes, is_here, to_host
from .dispatch import run

_copy = torch.ops.aten.copy_.default


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


def local_scalar_dense(tensor: Tensor) -> Any:
    """``aten::_local_scalar_dense``: waits for the value of a tensor of one element."""
    return to_host(tensor).item()
