"""`accelerate` takes the device where PyTorch has no other accelerator.

Patched: when they are imported, ``accelerate.state.PartialState.default_device``, the list of
devices with float16 and ``get_grad_scaler`` in ``accelerate.accelerator``, and the enumeration
``DynamoBackend``. Tried with accelerate 1.15; where a version has no such thing, nothing is
changed. ``TORCH_WEBGPU_TRAINERS=0`` leaves all as it is, which `is_wanted` asks at each choice.

Why: it has a fixed list of device types and ends it with the CPU. (Its variable
``ACCELERATE_TORCH_DEVICE`` is no way to say it for everybody: it also wins over ``cpu=True``.)

Until: `accelerate` asks `torch.accelerator`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import devices
from ..import_hooks import after_import
from .accelerator import is_wanted


def install() -> None:
    """Has ``accelerate`` choose the device, once it is imported."""
    after_import("accelerate.state", _choose_device)
    after_import("accelerate.accelerator", _allow_float16)
    after_import("accelerate.utils.dataclasses", _add_backend)


def _choose_device(module: Any) -> None:
    state = getattr(module, "PartialState", None)
    original = getattr(state, "default_device", None)
    if state is None or not isinstance(original, property) or original.fget is None:
        return
    choose = original.fget

    @functools.wraps(choose)
    def default_device(self: Any) -> torch.device:
        chosen: torch.device = choose(self)
        return torch.device(devices.NAME) if chosen.type == "cpu" and is_wanted() else chosen

    state.default_device = property(default_device)


def _allow_float16(module: Any) -> None:
    """Adds the device to the list of those that have float16, a constant of a function.

    The scaler of losses, which `accelerate` then makes for CUDA, is made for the device.
    """
    constructor = getattr(getattr(module, "Accelerator", None), "__init__", None)
    code = getattr(constructor, "__code__", None)
    if constructor is None or code is None:
        return
    constructor.__code__ = code.replace(co_consts=tuple(map(_with_device, code.co_consts)))
    make_scaler = getattr(module, "get_grad_scaler", None)
    if make_scaler is None:
        return

    @functools.wraps(make_scaler)
    def get_grad_scaler(*arguments: Any, **keywords: Any) -> Any:
        if is_wanted():
            return torch.amp.GradScaler(devices.NAME, **keywords)
        return make_scaler(*arguments, **keywords)

    module.get_grad_scaler = get_grad_scaler


def _with_device(constant: Any) -> Any:
    is_list = isinstance(constant, tuple) and {"cuda", "xpu", "mps"} <= {
        entry for entry in constant if isinstance(entry, str)
    }
    return (*constant, devices.NAME) if is_list else constant


def _add_backend(module: Any) -> None:
    """Adds ``backend="webgpu"`` to the list of Dynamo's backends, an enumeration."""
    backends = getattr(module, "DynamoBackend", None)
    name = devices.NAME.upper()
    if backends is None or name in backends.__members__:
        return
    member = str.__new__(backends, name)
    member._name_ = member._value_ = name
    backends._member_map_[name] = backends._value2member_map_[name] = member
    backends._member_names_.append(name)
