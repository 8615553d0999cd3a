"""GPU memory as ``torch.webgpu`` tells of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from ...errors import human_bytes
from .. import devices
from ..tensors.deferred import settle
from .properties import available_host_memory, get_device_properties

_Device = torch.device | str | int | None


def _stats(device: _Device) -> dict[str, int]:
    settle()
    index = devices.resolve_index(device)
    if not devices.is_opened(index):
        return {}
    return devices.get_device(index).memory_stats()


def memory_allocated(device: _Device = None) -> int:
    """Bytes of GPU memory that tensors and running graphs occupy."""
    return _stats(device).get("allocated", 0)


def max_memory_allocated(device: _Device = None) -> int:
    """The largest `memory_allocated` since the start or `reset_peak_memory_stats`."""
    return _stats(device).get("peak_allocated", 0)


def memory_reserved(device: _Device = None) -> int:
    """Bytes taken from the GPU: allocated ones, and those kept for reuse until `empty_cache`."""
    return _stats(device).get("reserved", 0)


def max_memory_reserved(device: _Device = None) -> int:
    """The largest `memory_reserved` since the start or `reset_peak_memory_stats`."""
    stats = _stats(device)
    return stats.get("peak_reserved", max(stats.get("reserved", 0), stats.get("peak_allocated", 0)))


def memory_stats(device: _Device = None) -> OrderedDict[str, Any]:
    """Statistics under the names of ``torch.cuda.memory_stats``, as far as they are kept.

    All numbers are bytes; those of a device that has not been used are 0.
    """
    return OrderedDict(
        [
            ("allocated_bytes.all.current", memory_allocated(device)),
            ("allocated_bytes.all.peak", max_memory_allocated(device)),
            ("reserved_bytes.all.current", memory_reserved(device)),
            ("reserved_bytes.all.peak", max_memory_reserved(device)),
        ]
    )


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """`memory_stats` as a table for people."""
    index = devices.resolve_index(device)
    rows = [
        ("allocated", memory_allocated(index), max_memory_allocated(index)),
        ("reserved", memory_reserved(index), max_memory_reserved(index)),
    ]
    lines = [f"Memory of webgpu:{index}", f"{'':<12}{'now':>14}{'peak':>14}"]
    for name, now, peak in rows:
        lines.append(f"{name:<12}{human_bytes(now):>14}{human_bytes(peak):>14}")
    return "\n".join(lines)


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Starts the peaks again from what is in use now."""
    settle()
    index = devices.resolve_index(device)
    if devices.is_opened(index):
        devices.get_device(index).reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Does nothing: no sums are kept."""


def empty_cache() -> None:
    """Gives memory that no tensor needs back to the GPU, on all devices."""
    settle()
    for device in devices.opened():
        device.empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Bytes of memory that are free, and that there are: the host's, for what shares it.

    Raises:
        AdapterError: there is no such device.
        NotImplementedError: the GPU has memory of its own, of which WebGPU does not tell, or the
            system does not tell of the host's.
    """
    properties = get_device_properties(device)
    free = available_host_memory() if properties.total_memory_is_known else 0
    if free:
        return free, properties.total_memory
    raise NotImplementedError(
        f"WebGPU does not tell how much memory of {properties.name} is free; "
        "torch.webgpu.memory_reserved() is what this process has taken"
    )
