"""GPU memory as ``torch.webgpu`` tells of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

from ...errors import human_bytes
from ...tensors import devices
from ...tensors.deferred import settle
from . import refused
from .properties import available_host_memory, get_device_properties
from .snapshots import _dump_snapshot, _record_memory_history, _snapshot, memory_snapshot

if TYPE_CHECKING:
    from ...runtime.device import Device

__all__ = [
    "current_allocated_memory",
    "driver_allocated_memory",
    "empty_cache",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "recommended_max_memory",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_memory_limit",
    "set_per_process_memory_fraction",
]
__all__ += ["_dump_snapshot", "_record_memory_history", "_snapshot"]  # as in torch.cuda.memory
globals().update(refused.functions("memory."))

_Device = torch.device | str | int | None

_limits: dict[int, int] = {}


def _stats(device: _Device) -> dict[str, int]:
    settle()
    index = devices.resolve_index(device)
    if not devices.is_opened(index):
        return {}
    return devices.get_device(index).pool.stats()


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


def memory_stats_as_nested_dict(device: _Device = None) -> dict[str, Any]:
    """`memory_stats`, with a dictionary for each part of a name."""
    return _nested(memory_stats(device))


def _nested(stats: OrderedDict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in stats.items():
        *parts, last = name.split(".")
        inside = found
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return found


def host_memory_stats() -> OrderedDict[str, Any]:
    """Buffers in the host's memory that are kept for transfers, of all devices, and their bytes.

    The names are those of ``torch.cuda.host_memory_stats``, as far as they are kept.
    """
    kept = [device.transfers.staging() for device in devices.opened()]
    return OrderedDict(
        [
            ("allocated_bytes.current", sum([nbytes for _, nbytes in kept])),
            ("allocations.current", sum([count for count, _ in kept])),
        ]
    )


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """`host_memory_stats`, with a dictionary for each part of a name."""
    return _nested(host_memory_stats())


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
        devices.get_device(index).pool.reset_peak()


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Does nothing: no sums are kept."""


def reset_accumulated_host_memory_stats() -> None:
    """Does nothing: no sums are kept."""


def reset_peak_host_memory_stats() -> None:
    """Does nothing: no peaks are kept."""


def current_allocated_memory() -> int:
    """`memory_allocated` of the current device, under the name of ``torch.mps``."""
    return memory_allocated()


def driver_allocated_memory() -> int:
    """`memory_reserved` of the current device, under the name of ``torch.mps``."""
    return memory_reserved()


def recommended_max_memory(device: _Device = None) -> int:
    """Bytes of memory that a device has.

    Raises:
        NotImplementedError: WebGPU does not tell, which is so of all but software adapters.
    """
    properties = get_device_properties(device)
    if not properties.total_memory_is_known:
        raise NotImplementedError(
            f"WebGPU does not tell how much memory {properties.name} has; give a number of bytes "
            "to torch.webgpu.set_memory_limit(), where a limit is wanted"
        )
    return properties.total_memory


def set_memory_limit(nbytes: int | None, device: _Device = None) -> None:
    """Makes allocations fail beyond so many bytes of a device's memory; None: no limit.

    What is kept for reuse counts, but is given back before an allocation fails.

    Raises:
        ValueError: a negative number.
    """
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"a limit of {nbytes} bytes: it cannot be negative")
    index = devices.resolve_index(device)
    devices.check_index(index)
    if nbytes is None:
        _limits.pop(index, None)
    else:
        _limits[index] = nbytes
    devices.set_up("memory limit", _limit)


def _limit(index: int, device: Device) -> None:
    device.pool.limit_nbytes = _limits.get(index)


def set_per_process_memory_fraction(fraction: float, device: _Device = None) -> None:
    """`set_memory_limit` to a fraction of a device's memory, up to 1, which is no limit.

    Raises:
        NotImplementedError: as `recommended_max_memory`, for a fraction below 1.
        TypeError, ValueError: as ``torch.cuda``'s.
    """
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    limit = None if fraction == 1 else int(fraction * recommended_max_memory(device))
    set_memory_limit(limit, device)


def get_per_process_memory_fraction(device: _Device = None) -> float:
    """The limit as a fraction of the device's memory: 1 without one.

    Raises:
        NotImplementedError: as `recommended_max_memory`, where there is a limit.
    """
    limit = _limits.get(devices.resolve_index(device))
    return 1.0 if limit is None else limit / recommended_max_memory(device)


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
