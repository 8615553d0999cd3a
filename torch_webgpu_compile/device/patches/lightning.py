"""Lightning's ``Trainer(accelerator="webgpu")``, and what "auto" and "gpu" are where it is the GPU.

Patched: four functions of Lightning's ``_AcceleratorConnector``, when it is imported: the choices
of the accelerator by "auto" and by "gpu", of the strategy, and of the precision; and
``is_cuda_out_of_memory`` of its ``utilities.memory``. Tried with Lightning 2.6; what a version does
not have is left alone.

Why: its registry of accelerators is open to others, but the choices made around it are lists of
device types that end with the CPU. And the search for a batch size that fits looks for "CUDA" in
the text of an error.

Until: these choices ask the registered accelerators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import after_import, around
from .accelerator import is_wanted

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CONNECTOR = "trainer.connectors.accelerator_connector"


def install() -> None:
    """Has Lightning know the device as an accelerator as soon as it is imported."""
    for package in _PACKAGES:
        after_import(f"{package}.{_CONNECTOR}", _register)


def _register(module: Any) -> None:
    accelerator = _accelerator(module.Accelerator)
    module.AcceleratorRegistry.register(devices.NAME, accelerator, description="WebGPU")


def _connector(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return around(*(f"{each}.{_CONNECTOR}:_AcceleratorConnector.{name}" for each in _PACKAGES))


@_connector("_choose_auto_accelerator")
def choose_auto(original: Any) -> str:
    chosen: str = original()
    return devices.NAME if chosen == "cpu" and is_wanted() else chosen


@_connector("_choose_gpu_accelerator_backend")
def choose_gpu(original: Any) -> str:
    if is_wanted():
        return devices.NAME
    chosen: str = original()
    return chosen


def _is_here(connector: Any) -> bool:
    return type(connector.accelerator).__name__ == "WebGPUAccelerator"


@_connector("_choose_strategy")
def choose_strategy(original: Any, self: Any) -> Any:
    chosen = original(self)
    # Not one for several devices, or of the user.
    if _is_here(self) and type(chosen).__name__ == "SingleDeviceStrategy":
        return type(chosen)(device=self._parallel_devices[0])
    return chosen


@_connector("_check_and_init_precision")
def choose_precision(original: Any, self: Any) -> Any:
    mixed = self._precision_flag in ("16-mixed", "bf16-mixed")
    given = self._precision_plugin_flag is not None
    if _is_here(self) and mixed and not given:
        self._validate_precision_choice()
        return sys.modules[type(self).__module__].MixedPrecision(self._precision_flag, devices.NAME)
    return original(self)


@around(*(f"{package}.utilities.memory:is_cuda_out_of_memory" for package in _PACKAGES))
def is_out_of_memory(original: Any, exception: BaseException) -> bool:
    return isinstance(exception, torch.OutOfMemoryError) or bool(original(exception))


def _count() -> int:
    return devices.device_count()


def _accelerator(base: Any) -> Any:
    class WebGPUAccelerator(base):  # type: ignore[misc]
        """The ``webgpu`` devices."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != devices.NAME:
                raise ValueError(f"Device should be {devices.NAME}, got {device} instead")
            torch.get_device_module(devices.NAME).set_device(device)

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            stats: dict[str, Any] = torch.get_device_module(devices.NAME).memory_stats(device)
            return stats

        def teardown(self) -> None:
            torch.get_device_module(devices.NAME).empty_cache()

        @staticmethod
        def parse_devices(devices: int | str | list[int]) -> list[int]:
            """Indices: of the first so many, or those that are listed; -1: of all."""
            if isinstance(devices, str):
                parts = [int(part) for part in devices.split(",") if part.strip()]
                devices = parts if "," in devices else parts[0]
            if isinstance(devices, int):
                return list(range(_count() if devices == -1 else devices))
            return list(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("webgpu", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1  # several may be of very different speed, and gradients go through the host

        @staticmethod
        def is_available() -> bool:
            return _count() > 0

        @staticmethod
        def name() -> str:
            return devices.NAME

    return WebGPUAccelerator
