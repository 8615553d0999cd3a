"""Time per dispatch of a bound plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .device import Device
from .executor import BoundPlan
from .interface import Span
from .queue import Recording

_MOST_REPEATS = 1 << 12


def time_steps(bound: BoundPlan) -> list[float]:
    """Seconds of each `Dispatch` step of the plan, in order; 0.0 for those with an empty grid.

    From timestamp queries, every dispatch in a pass of its own; without them by the host's clock,
    its wait for the GPU included.

    Raises:
        DeviceError, DeviceLostError: the device refused.
    """
    seconds = [0.0] * bound.executor.plan.dispatch_count

    def add(recording: Recording, spans: Sequence[Span]) -> None:
        for step, (start, end) in zip(recording.steps, spans, strict=True):
            seconds[step.index] += end - start  # of all slices of one that is divided

    queue = bound.executor.device.queue
    queue.watch(add)
    try:
        bound.replay()
    finally:
        queue.watch(None)
    return seconds


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
