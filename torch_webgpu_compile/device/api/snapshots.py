"""Snapshots of a device's memory, in the form that ``torch.cuda`` and pytorch.org/memory_viz use.

A segment is a buffer of the GPU, and a block is all of it: WebGPU's buffers are not divided. Their
addresses are made up, as there are none, so that no two overlap.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ...tensors import devices
from ...tensors.deferred import settle

if TYPE_CHECKING:
    from ...runtime.allocation_history import AllocationEvent, Frame
    from ...runtime.device import Device

_Device = torch.device | str | int | None

_ADDRESS_BITS = 40  # of the largest buffer that any provider allows
_LARGE_NBYTES = 1 << 20


def memory_snapshot(mempool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """All memory that this process has of all devices that were used: a list of segments.

    Args:
        mempool_id: must be None: there are no pools.
        include_traces: with the stacks of allocations, as far as they are recorded.
    """
    if mempool_id is not None:
        raise NotImplementedError(
            "torch.webgpu.memory_snapshot: there are no memory pools; leave mempool_id out"
        )
    settle()
    return [
        segment
        for index in range(devices.device_count())
        if devices.is_opened(index)
        for segment in _segments(index, devices.get_device(index), include_traces)
    ]


def _segments(index: int, device: Device, with_frames: bool) -> list[dict[str, Any]]:
    from ...runtime.allocation_history import history_of

    history = history_of(device.pool)
    present = history.present if history is not None and with_frames else {}
    found = []
    for serial, nbytes, asked in device.pool.blocks():
        address = serial << _ADDRESS_BITS
        used = 0 if asked is None else nbytes
        block = {
            "address": address,
            "size": nbytes,
            "requested_size": asked or 0,
            "state": "inactive" if asked is None else "active_allocated",
            "frames": _frames(present.get(serial, ())),
        }
        found.append(
            {
                "device": index,
                "address": address,
                "total_size": nbytes,
                "allocated_size": used,
                "active_size": used,
                "requested_size": asked or 0,
                "stream": 0,
                "segment_type": "large" if nbytes > _LARGE_NBYTES else "small",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [block],
            }
        )
    return found


def _frames(frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in frames]


def _record_memory_history(
    enabled: str | bool | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: _Device = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    """Records which code allocates memory on all devices, for `_snapshot`; with None, no longer.

    The arguments are those of ``torch.cuda.memory._record_memory_history``. A loan of memory that
    ends is recorded when memory is next asked for. Frames are Python's, from outside of this
    package.

    Raises:
        ValueError: an argument is none of those that are known.
    """
    if enabled not in (None, False, True, "state", "all"):
        raise ValueError(f"enabled={enabled!r}: expected None, 'state' or 'all'")
    if context not in (None, "state", "alloc", "all"):
        raise ValueError(f"context={context!r}: expected None, 'state', 'alloc' or 'all'")
    from ...runtime.allocation_history import History, history_of, record

    entries = max_entries if enabled in (True, "all") else 0

    def set_up(_: int, opened: Device) -> None:
        if not enabled:
            record(opened.pool, None)
            return
        history = History(context, deque(maxlen=entries), frozenset(skip_actions or ()))
        before = history_of(opened.pool)
        if before is not None and not clear_history:
            history.present = before.present
            history.events.extend(before.events)
        record(opened.pool, history)

    settle()
    devices.set_up("memory history", set_up)


def _snapshot(device: _Device = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """`memory_snapshot` as ``segments``, and what was recorded of each device since then."""
    from ...runtime.allocation_history import history_of

    segments = memory_snapshot()
    traces: list[list[dict[str, Any]]] = []
    for index in range(devices.device_count()):
        history = history_of(devices.get_device(index).pool) if devices.is_opened(index) else None
        traces.append([] if history is None else [_entry(event) for event in history.events])
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _entry(event: AllocationEvent) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "action": event.action,
        "size": event.nbytes,
        "stream": 0,
        "frames": _frames(event.frames),
        "time_us": event.microseconds,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
    }
    if event.action == "oom":
        entry["device_free"] = 0  # WebGPU does not tell
    else:
        entry["addr"] = event.serial << _ADDRESS_BITS
    return entry


def _dump_snapshot(
    filename: str = "dump_snapshot.pickle", augment_with_fx_traces: bool = False
) -> None:
    """Writes `_snapshot` to a file, which pytorch.org/memory_viz shows."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
