"""``torch.accelerator``: what PyTorch asks of "the" accelerator of a machine.

Patched: the functions of ``torch._C`` that ``torch.accelerator`` calls.

Why: PyTorch's C++ code takes a PrivateUse1 backend for the accelerator as soon as one is
registered, and gives those in Python no way to answer most questions. A CUDA, XPU or MPS device
stays the accelerator where there is one: nobody's program changes devices because this package was
installed.

Until: a PrivateUse1 backend in Python can answer these questions, and be registered without
becoming the accelerator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from ...tensors import devices
from ..registration import untraced


@functools.cache
def current() -> torch.device:
    """The accelerator: PyTorch's own where one is available, else ``webgpu``."""
    for name in ("cuda", "xpu", "mps", "mtia"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return torch.device(name)
    return torch.device(devices.NAME)


def is_wanted() -> bool:
    """Whether a tool that looks for an accelerator should find this one. It may open WebGPU."""
    if os.environ.get("TORCH_WEBGPU_TRAINERS", "1") == "0":
        return False
    return current().type == devices.NAME and devices.device_count() > 0


def _module() -> Any:
    return torch.get_device_module(current())


def _set_device_index(index: int) -> None:
    if index >= 0:
        _module().set_device(index)


def _exchange_device(index: int) -> int:
    """Makes a device current; the one that was. A negative index does nothing."""
    before: int = _module().current_device()
    _set_device_index(index)
    return before


def _capability(index: int) -> dict[str, Any]:
    module = _module()
    capability = module.get_device_capability(index)
    return capability if isinstance(capability, dict) else {}


def _ask(name: str) -> Callable[..., Any]:
    """What a function of the accelerator's module answers."""
    return lambda *arguments: getattr(_module(), name)(*arguments)


def _default_generator(index: int) -> torch.Generator:
    module = _module()
    generators = getattr(module, "default_generators", None)
    if generators is None:  # of "mps", which has one device
        only: torch.Generator = module._get_default_mps_generator()
        return only
    found: torch.Generator = generators[index]
    return found


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_get_accelerator": lambda *_: current(),
    "_accelerator_getAccelerator": current,
    "_accelerator_getDeviceIndex": _ask("current_device"),
    "_accelerator_setDeviceIndex": _set_device_index,
    "_accelerator_exchangeDevice": _exchange_device,
    "_accelerator_maybeExchangeDevice": _exchange_device,
    "_accelerator_getStream": _ask("current_stream"),
    "_accelerator_setStream": _ask("set_stream"),
    "_accelerator_synchronizeDevice": _ask("synchronize"),
    "_accelerator_isAllocatorInitialized": _ask("is_initialized"),
    "_accelerator_emptyCache": _ask("empty_cache"),
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_getDeviceStats": _ask("memory_stats"),
    "_accelerator_getMemoryInfo": _ask("mem_get_info"),
    "_accelerator_resetPeakStats": _ask("reset_peak_memory_stats"),
    "_accelerator_resetAccumulatedStats": _ask("reset_accumulated_memory_stats"),
    "_accelerator_getDeviceCapability": _capability,
    "_accelerator_getDefaultGenerator": _default_generator,
}


def install() -> None:
    """Has ``torch.accelerator`` report the device, by replacing the functions that it calls."""
    for name, function in _FUNCTIONS.items():
        if hasattr(torch._C, name):  # some are newer than PyTorch 2.11
            setattr(torch._C, name, untraced(function))
