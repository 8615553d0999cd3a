"""`accelerate` and `transformers.Trainer` take the device where PyTorch has no other accelerator.

Both have a fixed list of device types and end it with the CPU. (Their variable
``ACCELERATE_TORCH_DEVICE`` is no way to say it for everybody: it also wins over ``cpu=True`` and
``use_cpu=True``.) `install` changes the end of the list, when the packages are imported.
``TORCH_WEBGPU_TRAINERS=0`` leaves them as they are, which `is_wanted` asks at each choice.

Goes when `accelerate` asks `torch.accelerator`. Tried with accelerate 1.15 and transformers 5.23;
where a version has no such function, nothing is changed.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from .. import devices
from . import accelerator
from .import_hooks import after_import


def install() -> None:
    """Waits for the packages."""
    after_import("accelerate.state", _choose_in_accelerate)
    after_import("transformers.training_args", _choose_in_transformers)


def is_wanted() -> bool:
    """Whether a tool that looks for an accelerator should find this one. It may open WebGPU."""
    if os.environ.get("TORCH_WEBGPU_TRAINERS", "1") == "0":
        return False
    return accelerator.current().type == devices.NAME and devices.device_count() > 0


def _choose_in_accelerate(module: Any) -> None:
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


def _choose_in_transformers(module: Any) -> None:
    arguments = getattr(module, "TrainingArguments", None)
    original = vars(arguments).get("_setup_devices") if arguments is not None else None
    if not isinstance(original, functools.cached_property):
        return
    choose = original.func

    @functools.wraps(choose)
    def _setup_devices(self: Any) -> torch.device:
        chosen: torch.device = choose(self)
        state = getattr(self, "distributed_state", None)  # has asked `accelerate`
        if chosen.type == "cpu" and state is not None and state.device.type == devices.NAME:
            return torch.device("cpu") if self.use_cpu else state.device
        return chosen

    replacement = functools.cached_property(_setup_devices)
    replacement.__set_name__(arguments, "_setup_devices")
    arguments._setup_devices = replacement
