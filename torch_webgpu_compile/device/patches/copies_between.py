"""``nn.DataParallel`` and what it is made of: copies to several devices, and from them.

Patched: the functions of ``torch._C`` that ``torch.nn.parallel.comm`` calls.

Why: PyTorch has them in builds with CUDA only, where they take an index for a CUDA device's.

Until: PyTorch has them for the accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices
from . import accelerator


def _scatter(
    tensor: Tensor, indices: Sequence[int], sizes: Sequence[int] | None, dim: int, _: Any = None
) -> list[Tensor]:
    """Chunks of a tensor of the host or of a device, each on its device."""
    chunks = (
        tensor.chunk(len(indices), dim) if sizes is None else torch.split(tensor, list(sizes), dim)
    )
    return [chunk.to(_place(index)) for index, chunk in zip(indices, chunks, strict=False)]


def _scatter_out(tensor: Tensor, out: Sequence[Tensor], dim: int, _: Any = None) -> list[Tensor]:
    chunks = torch.split(tensor, [result.shape[dim] for result in out], dim)
    return [result.copy_(chunk) for result, chunk in zip(out, chunks, strict=True)]


def _gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    """Tensors of several devices, joined on one (None: the current) or on the host (-1)."""
    place = torch.device("cpu") if destination == -1 else _place(destination)
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def _gather_out(tensors: Sequence[Tensor], out: Tensor, dim: int) -> Tensor:
    return torch.cat([tensor.to(out.device) for tensor in tensors], dim, out=out)


def _broadcast(tensor: Tensor, indices: Sequence[int]) -> list[Tensor]:
    """A tensor on each of the devices: itself on the first, if it is there."""
    first, *rest = map(_place, indices)
    return [tensor.to(first), *(tensor.to(place, copy=True) for place in rest)]


def _broadcast_out(tensor: Tensor, out: Sequence[Tensor]) -> list[Tensor]:
    return [result.copy_(tensor) for result in out]


def _broadcast_coalesced(
    tensors: Sequence[Tensor], indices: Sequence[int], _: int = 0
) -> list[list[Tensor]]:
    """For each device, the tensors on it. They are not joined: copies have no start-up to save."""
    copies = [_broadcast(tensor, indices) for tensor in tensors]
    return [[copy[k] for copy in copies] for k in range(len(indices))]


def _place(index: int | None) -> torch.device:
    return devices.torch_device(devices.current_index() if index is None else index)


def install() -> None:
    """Gives PyTorch the functions, where indices are those of the device."""
    for function in (
        *(_scatter, _scatter_out, _gather, _gather_out),
        *(_broadcast, _broadcast_out, _broadcast_coalesced),
    ):
        name = function.__name__
        setattr(torch._C, name, _for_device(function, getattr(torch._C, name, None)))


def _for_device(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    if original is None:
        return function

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        is_here = accelerator.current().type == devices.NAME
        return (function if is_here else original)(*arguments)

    return call
