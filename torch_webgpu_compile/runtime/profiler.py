"""Time per dispatch of a bound plan."""

from __future__ import annotations

import time
from collections.abc import Callable

from .device import Device
from .executor import BoundPlan
from .interface import DispatchRun
from .pacing import MAX_SECONDS
from .queue import Recording, time_on_host
from .sized import HostCommand

_REPEATS = 20
_MOST_REPEATS = 1 << 12


def time_steps(bound: BoundPlan) -> list[float]:
    """Seconds of each `Dispatch` step of the plan, in order; 0.0 for those with an empty grid.

    From timestamp queries, every dispatch in a pass of its own; without the feature, the mean of
    repeated dispatches, which changes the contents of buffers that a kernel updates in place.

    Raises:
        DeviceError, DeviceLostError: the device refused.
    """
    executor = bound.executor
    backend, queue = executor.device.backend, executor.device.queue
    name = executor.plan.name
    measured: list[float] = []
    with executor.lock:
        for segment in bound.segments():
            if isinstance(segment, HostCommand):
                bound.run_host_step(segment)
                continue
            for command in segment.commands:
                if not isinstance(command, DispatchRun):
                    queue.submit([command], name)
                    continue
                queue.flush()  # the next line goes past the queue
                spans = backend.submit_timed(command, name)
                spans = spans or time_on_host(backend, command, name, _repeats(segment))
                measured += [end - start for start, end in spans]
    seconds = [0.0] * executor.plan.dispatch_count
    for step, value in zip(bound.dispatch_steps, measured, strict=True):
        seconds[step] += value  # of all slices of one that is divided
    return seconds


def _repeats(recording: Recording) -> int:
    """How often each dispatch may run in one submission; see `pacing`."""
    longest = max(step.seconds for step in recording.steps)
    return max(1, min(_REPEATS, int(MAX_SECONDS / max(longest, 1e-9))))


def best_seconds(
    record: Callable[[], None], device: Device, round_seconds: float, rounds: int = 1
) -> float:
    """Seconds of what ``record`` records, among as many as fill a round; the best of the rounds.

    Raises:
        DeviceError: the device refused.
    """
    record()
    device.synchronize()
    count, best = 1, float("inf")
    while rounds > 0:
        start = time.perf_counter()
        for _ in range(count):
            record()
        device.synchronize()
        elapsed = time.perf_counter() - start
        if elapsed < round_seconds and count < _MOST_REPEATS:
            count *= 4
            continue
        best = min(best, elapsed / count)
        rounds -= 1
    return best
