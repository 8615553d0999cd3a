"""Lightning's ``Trainer(accelerator="webgpu")``, and what "auto" and "gpu" are where it is the GPU.

Patched: four functions of Lightning's ``_AcceleratorConnector``, when it is imported: the choices
of the accelerator by "auto" and by "gpu", of the strategy, and of the precision; and
``is_cuda_out_of_memory`` of its ``utilities.memory``. Tried with Lightning 2.6; a version without
such functions is left alone.

Why: its registry of accelerators is open to others, but the choices made around it are lists of
device types that end with the CPU. And the search for a batch size that fits looks for "CUDA" in
the text of an error.

Until: these choices ask the registered accelerators.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import devices
from ..import_hooks import after_import
from .accelerator import is_wanted

_CONNECTOR = "trainer.connectors.accelerator_connector"
_CHANGED = (
    "_choose_auto_accelerator",
    "_choose_gpu_accelerator_backend",
    "_choose_strategy",
    "_check_and_init_precision",
)


def install() -> None:
    """Has Lightning know the device as an accelerator as soon as it is imported."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        after_import(f"{package}.{_CONNECTOR}", _teach)
        after_import(f"{package}.utilities.memory", _recognize_errors)


def _teach(module: Any) -> None:
    connector: Any = getattr(module, "_AcceleratorConnector", None)
    if connector is None or not all(hasattr(connector, name) for name in _CHANGED):
        return
    accelerator = _accelerator(module.Accelerator)
    module.AcceleratorRegistry.register(devices.NAME, accelerator, description="WebGPU")
    choose_auto = connector._choose_auto_accelerator
    choose_gpu = connector._choose_gpu_accelerator_backend
    choose_strategy = connector._choose_strategy
    choose_precision = connector._check_and_init_precision

    def auto() -> str:
        chosen: str = choose_auto()
        return devices.NAME if chosen == "cpu" and is_wanted() else chosen

    def gpu() -> str:
        if is_wanted():
            return devices.NAME
        chosen: str = choose_gpu()
        return chosen

    @functools.wraps(choose_strategy)
    def strategy(self: Any) -> Any:
        chosen = choose_strategy(self)
        if (
            isinstance(self.accelerator, accelerator)
            and type(chosen) is module.SingleDeviceStrategy
        ):
            return module.SingleDeviceStrategy(device=self._parallel_devices[0])
        return chosen

    @functools.wraps(choose_precision)
    def precision(self: Any) -> Any:
        mixed = self._precision_flag in ("16-mixed", "bf16-mixed")
        given = self._precision_plugin_flag is not None
        if isinstance(self.accelerator, accelerator) and mixed and not given:
            self._validate_precision_choice()
            return module.MixedPrecision(self._precision_flag, devices.NAME)
        return choose_precision(self)

    connector._choose_auto_accelerator = staticmethod(auto)
    connector._choose_gpu_accelerator_backend = staticmethod(gpu)
    connector._choose_strategy = strategy
    connector._check_and_init_precision = precision


def _recognize_errors(module: Any) -> None:
    original = getattr(module, "is_cuda_out_of_memory", None)
    if original is None:
        return

    def is_cuda_out_of_memory(exception: BaseException) -> bool:
        return isinstance(exception, torch.OutOfMemoryError) or bool(original(exception))

    module.is_cuda_out_of_memory = is_cuda_out_of_memory


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
