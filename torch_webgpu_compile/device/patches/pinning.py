"""Pinned host memory, which WebGPU does not have: any memory serves, as transfers stage it.

Patched: PyTorch's kernels of ``aten::_pin_memory`` and ``aten::is_pinned`` for CPU tensors.
``pin_memory()`` then costs nothing: it gives a tensor over the same memory, which ``is_pinned``
from then on. Where CUDA or another device is the accelerator (see `accelerator`), both mean that
one.

Why: data loaders with ``pin_memory=True`` pin for the accelerator, and PyTorch asks a PrivateUse1
device for an allocator of pinned memory that only C++ can provide.

Until: a PrivateUse1 backend in Python can provide that allocator, or say that it needs none.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices
from ..registration import new_library, untraced
from . import accelerator

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# A device without kernels of its own for these operators: it gets PyTorch's composite ones.
_COMPOSITE = torch._C.DispatchKeySet(torch._C.DispatchKey.MTIA)

_pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def _place(device: Any) -> torch.device:
    """The device that memory is to be pinned for."""
    return accelerator.current() if device is None else torch.device(device)


def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """``aten::_pin_memory`` of a CPU tensor."""
    place = _place(device)
    if place.type != devices.NAME:
        copy: Tensor = torch.ops.aten._pin_memory.default.redispatch(_COMPOSITE, tensor, place)
        return copy
    _pinned.add(tensor.untyped_storage())
    alias: Tensor = torch.ops.aten.alias.default.redispatch(_CPU, tensor)
    return alias


def is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """``aten::is_pinned`` of a CPU tensor."""
    place = _place(device)
    if place.type != devices.NAME:
        found: bool = torch.ops.aten.is_pinned.default.redispatch(_COMPOSITE, tensor, place)
        return found
    return tensor.untyped_storage() in _pinned


def install() -> None:
    """Gives PyTorch the kernels."""
    library = new_library("aten")
    library.impl("_pin_memory", untraced(pin_memory), "CPU")
    library.impl("is_pinned", untraced(is_pinned), "CPU")
