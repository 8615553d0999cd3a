"""Properties of a ``webgpu`` device: its name, limits and features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from ...tensors import devices

__all__ = [
    "DeviceProperties",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_bf16_supported",
]

# What WebGPU buffers can hold, and every device converts. An operator may still run on the host.
_STORED = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """A device as data.

    Attributes:
        name: the GPU's name.
        total_memory: bytes. WebGPU does not tell how much memory a GPU has: for software adapters
            and GPUs without memory of their own this is the host's, for others the largest buffer,
            which is a lower bound
            (``total_memory_is_known`` is False).
        total_memory_is_known: whether ``total_memory`` is the memory of the device.
        vendor: lower-case vendor name, "" when unknown.
        backend: ``Vulkan``, ``Metal``, ``D3D12`` or ``OpenGL``.
        type: ``discrete``, ``integrated``, ``cpu`` or ``unknown``.
        driver: the driver's description.
        limits: WebGPU limits by name with dashes, e.g. ``max-buffer-size`` (bytes).
        features: WebGPU feature names.
        subgroup_sizes: smallest and largest subgroup size, (0, 0) without subgroups.
    """

    name: str
    total_memory: int
    total_memory_is_known: bool
    vendor: str
    backend: str
    type: str
    driver: str
    limits: Mapping[str, int] = field(repr=False)
    features: frozenset[str] = field(repr=False)
    subgroup_sizes: tuple[int, int]


def get_device_properties(device: torch.device | str | int | None = None) -> DeviceProperties:
    """The properties of a device (the current one by default), which is not opened.

    Raises:
        AdapterError: there is no such device.
    """
    info = devices.adapter_of(devices.resolve_index(device))
    host = _host_memory() if info.type in ("cpu", "integrated") else 0
    return DeviceProperties(
        name=info.name,
        total_memory=host or info.limits["max-buffer-size"],
        total_memory_is_known=bool(host),
        vendor=info.vendor,
        backend=info.backend,
        type=info.type,
        driver=info.driver,
        limits=dict(info.limits),
        features=info.features,
        subgroup_sizes=info.subgroup_sizes,
    )


def _host_memory() -> int:
    """Bytes of the host's memory; 0 when the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def available_host_memory() -> int:
    """Bytes of the host's memory that can be had without swapping; 0 when nothing tells."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        return _available_by_psutil()


def _available_by_psutil() -> int:
    try:
        psutil: Any = import_module("psutil")  # which nothing here depends on
    except ImportError:
        return 0
    return int(psutil.virtual_memory().available)


def get_device_name(device: torch.device | str | int | None = None) -> str:
    """The name of a device's GPU. Raises as `get_device_properties` does."""
    return devices.adapter_of(devices.resolve_index(device)).name


def get_device_capability(device: torch.device | str | int | None = None) -> dict[str, Any]:
    """What a device can do: ``supported_dtypes``, ``native_dtypes`` and ``features``.

    There are no compute capability numbers in WebGPU. ``native_dtypes`` are those that kernels
    compute with; others are converted inside them or run on the host.

    Raises:
        AdapterError: there is no such device.
    """
    features = devices.adapter_of(devices.resolve_index(device)).features
    native = {torch.float32, torch.int32}
    extensions = {
        "shader-f16": torch.float16,
        "shader-int64": torch.int64,
        "shader-f64": torch.float64,
    }
    native |= {dtype for name, dtype in extensions.items() if name in features}
    return {"supported_dtypes": set(_STORED), "native_dtypes": native, "features": features}


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 tensors can be computed with: always, through float32 arithmetic.

    Args:
        including_emulation: False asks for arithmetic in bfloat16 itself, which WGSL does not have.
    """
    return including_emulation and devices.device_count() > 0
