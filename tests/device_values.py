"""Moves samples between the CPU and the device, with their layouts and shared memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

DEVICE = "webgpu"

# Operators that want some of their tensors on the CPU, wherever they run.
_WITH_CPU_TENSORS = frozenset({"tensor_split"})


def on_device(values: Any, info: Any = None) -> Any:
    """The same values on the device: the layouts, offsets and shared memory of ``values``."""
    if info is not None and info.name in _WITH_CPU_TENSORS:
        first, *rest = values
        return on_device(first), *copied(rest)
    storages: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = whole.to(DEVICE)
        memory = storages[storage._cdata].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
        made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    def place(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return move(value)
        if isinstance(value, torch.device) and value.type == "cpu":
            return torch.device(DEVICE)
        return DEVICE if isinstance(value, str) and value == "cpu" else value

    with torch.no_grad():
        return tree_map(place, values)


def on_cpu(values: Any) -> Any:
    """Detached CPU copies."""
    return tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), values)


def copied(values: Any) -> Any:
    """Copies with the layouts and shared memory of CPU tensors."""
    storages: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            storages[storage._cdata] = whole.clone()
        memory = storages[storage._cdata].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return tree_map_only(Tensor, copy, values)
