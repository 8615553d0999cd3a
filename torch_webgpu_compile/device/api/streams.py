"""Streams and events of a device that has one queue.

All work of a WebGPU device goes through one queue, in order: every stream is that queue, so the
promises of streams hold, but nothing runs side by side. WebGPU cannot be asked whether work is
done: what asks waits for it.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch

from ...tensors import devices
from ...tensors.deferred import settle
from ...torch_private import DeviceType

__all__ = [
    "Event",
    "Stream",
    "StreamContext",
    "current_stream",
    "default_stream",
    "set_stream",
    "stream",
    "synchronize",
]

_DEVICE_TYPE = int(DeviceType.PrivateUse1.value)


def synchronize(device: torch.device | str | int | None = None) -> None:
    """Waits for all work on a device (the current one by default).

    Raises:
        DeviceError: the work failed.
    """
    settle()
    index = devices.resolve_index(device)
    if devices.is_opened(index):
        devices.get_device(index).synchronize()
    else:
        devices.check_fork()
        devices.check_index(index)


class Stream(torch.Stream):
    """The queue of a device.

    Args:
        device: the device; the current one by default.
        priority: accepted for ``torch.cuda``'s sake; there is one queue.
    """

    def __new__(
        cls, device: torch.device | str | int | None = None, priority: int = 0, **_: Any
    ) -> Stream:
        index = devices.check_index(devices.resolve_index(device))
        stream: Stream = super().__new__(
            cls, stream_id=0, device_index=index, device_type=_DEVICE_TYPE
        )
        stream._entered = []
        return stream

    _entered: list[int]

    def __init__(
        self, device: torch.device | str | int | None = None, priority: int = 0, **_: Any
    ) -> None:
        pass

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        synchronize(self.device)

    def query(self) -> bool:
        """True: waits until all work is done, as WebGPU cannot be asked."""
        self.synchronize()
        return True

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, a new one by default."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        """Makes later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Makes later work wait for what is in a stream now."""
        if stream.device != self.device:
            stream.synchronize()

    def __enter__(self) -> Stream:
        self._entered.append(devices.set_current(self.device_index))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        devices.set_current(self._entered.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.device == other.device

    def __hash__(self) -> int:
        return hash((Stream, self.device))

    def __repr__(self) -> str:
        return f"<torch.webgpu.Stream device={self.device}>"


class Event(torch.Event):
    """A point in a device's queue.

    Args:
        enable_timing: lets `elapsed_time` be asked for. `record` then waits for the device, and
            takes the time when it is done: what lies between two events is timed as a whole.
        blocking, interprocess: as in ``torch.cuda``; every wait blocks.

    Raises:
        NotImplementedError: ``interprocess`` is True.
    """

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Event:
        if interprocess:
            raise NotImplementedError("webgpu events cannot be shared between processes")
        event: Event = super().__new__(cls, devices.NAME)
        event.enable_timing = enable_timing
        return event

    enable_timing: bool
    _device: torch.device | None = None
    _seconds = 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        """The device on which the event was recorded last."""
        return self._device

    def record(self, stream: torch.Stream | None = None) -> None:
        """Puts the event behind all work so far."""
        stream = current_stream() if stream is None else stream
        self._device = stream.device
        if self.enable_timing:
            stream.synchronize()
            self._seconds = time.perf_counter()

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Makes later work in a stream (the current one by default) wait for the event."""
        stream = current_stream() if stream is None else stream
        if self._device is not None and self._device != stream.device:
            synchronize(self._device)

    def synchronize(self) -> None:
        """Waits until the work before the event is done."""
        if self._device is not None:
            synchronize(self._device)

    def query(self) -> bool:
        """True: waits until the work before the event is done, as WebGPU cannot be asked."""
        self.synchronize()
        return True

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Milliseconds from this event to another one.

        Raises:
            TypeError: the other one is not of this class.
            ValueError: one of them has no timing, or was not recorded.
        """
        if not isinstance(end_event, Event):
            raise TypeError(f"expected a torch.webgpu.Event, got {type(end_event).__name__}")
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._device is None or end_event._device is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1e3

    def __repr__(self) -> str:
        return f"<torch.webgpu.Event device={self._device} enable_timing={self.enable_timing}>"


class StreamContext:
    """``with torch.webgpu.stream(s)``: makes the stream's device current. None does nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *reason: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*reason)


def stream(stream: Stream | None) -> StreamContext:
    """A context manager in which the stream's device is the current one."""
    return StreamContext(stream)


def current_stream(device: torch.device | str | int | None = None) -> Stream:
    """The only stream of a device."""
    return Stream(device)


def default_stream(device: torch.device | str | int | None = None) -> Stream:
    """The only stream of a device."""
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Makes a stream's device the current one."""
    devices.set_current(stream.device_index)
