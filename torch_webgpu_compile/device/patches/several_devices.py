"""More than one device: what PyTorch's C++ code believes a Python backend does not have.

Patched: once a process uses another device than the first, autograd's engine, which then runs
backward passes on the calling thread; and ``torch.tensor``, ``as_tensor``, ``asarray``,
``Tensor.new_tensor`` and ``Tensor.to``, for which ``"webgpu"`` then names the current device.

Why: PyTorch's guard for such a backend says that there is one device, and that ``webgpu:0`` is
current. So a backward pass refuses gradients on others, and ``tensor.to("webgpu")`` always means
the first.

Until: a device guard in Python can tell how many devices there are, and which is current.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import _device

from ...tensors import devices


def install() -> None:
    """Makes PyTorch work with devices other than the first, before one of them is used."""
    devices.when_several(_install)


def _install() -> None:
    _device._device_constructors()  # keeps the functions that are replaced below, which C++ names
    Variable._execution_engine = _Engine()
    for owner, name in (
        (torch, "tensor"),
        (torch, "as_tensor"),
        (torch, "asarray"),
        (torch.Tensor, "new_tensor"),
    ):
        setattr(owner, name, _with_index(getattr(owner, name)))
    to = _with_index(torch.Tensor.to, 1)
    torch.Tensor.to = to  # type: ignore[method-assign]
    parameter: Any = torch.nn.parameter
    parameter.UninitializedTensorMixin._allowed_methods.append(to)


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Runs backward passes on the calling thread, as PyTorch has a thread for ``webgpu:0`` only."""

    def run_backward(self, *arguments: Any, **keywords: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return super().run_backward(*arguments, **keywords)


def _with_index(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """``function``, with the current device where it is given a ``webgpu`` device without index.

    Args:
        position: where the device may be among the positional arguments.
    """

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        current = devices.current_index()
        if current:
            if _names_no_index(keywords.get("device")):
                keywords["device"] = devices.torch_device(current)
            elif (
                position is not None
                and len(arguments) > position
                and _names_no_index(arguments[position])
            ):
                place = devices.torch_device(current)
                arguments = (*arguments[:position], place, *arguments[position + 1 :])
        return function(*arguments, **keywords)

    return call


def _names_no_index(device: Any) -> bool:
    if isinstance(device, str):
        return device == devices.NAME
    return isinstance(device, torch.device) and device.type == devices.NAME and device.index is None
