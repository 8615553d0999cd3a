"""`CallData`: numbers and seeds of calls on their way to the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..runtime.buffers import SMALL_NBYTES, SMALL_USAGE
from ..runtime.device import Device, GpuBuffer


class CallData:
    """Memory for numbers and seeds of calls: buffers in turn, so that bind groups last.

    What comes twice in a row, such as the eps of a norm, stays in memory of its own.
    """

    _MOST_KEPT = 8
    _MOST_USED = 128  # by two batches: a stream of random calls takes one for each

    def __init__(self, device: Device) -> None:
        self._device = device
        self._used: deque[tuple[GpuBuffer, int]] = deque()
        self._kept: dict[bytes, GpuBuffer] = {}
        self._last = b""

    def upload(self, data: bytes) -> GpuBuffer:
        """A buffer with this content. Give it to `recorded` after the commands that read it."""
        kept = self._kept.get(data)
        if kept is not None:
            return kept
        if len(data) >= SMALL_NBYTES:
            return self._device.upload_new(data)
        if data == self._last and len(self._kept) < self._MOST_KEPT:
            kept = self._kept[data] = self._device.upload_new(data, SMALL_USAGE)
            return kept
        self._last = data
        try:
            buffer, batch = self._used.popleft()
        except IndexError:
            return self._device.upload_small(data)
        if batch < self._device.queue.sent:  # no pending command needs what it holds
            self._device.upload_small(data, buffer)
            return buffer
        self._used.appendleft((buffer, batch))
        return self._device.upload_small(data)

    def recorded(self, buffers: Sequence[GpuBuffer]) -> None:
        """Tells that all commands that read them are recorded.

        All but those that are kept, which are smaller, can be used again later.
        """
        batch = self._device.queue.batch
        for buffer in buffers:
            if len(self._used) < self._MOST_USED and buffer.nbytes == SMALL_NBYTES:
                self._used.append((buffer, batch))
