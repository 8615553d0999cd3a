"""Time per dispatch of a bound plan."""

from __future__ import annotations

import time

from .executor import BoundPlan
from .interface import DispatchRun
from .sized import HostCommand

_REPEATS = 20


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
        for segment in bound.program.segments:
            if isinstance(segment, HostCommand):
                executor.run_host_step(segment, bound)
                continue
            for command in segment.commands:
                if not isinstance(command, DispatchRun):
                    queue.submit([command], name)
                    continue
                queue.flush()  # the next line goes past the queue
                times = backend.submit_timed(command, name)
                measured += _time_on_host(bound, command) if times is None else times
    seconds = [0.0] * executor.plan.dispatch_count
    for step, value in zip(bound.program.dispatch_steps, measured, strict=True):
        seconds[step] = value
    return seconds


def _time_on_host(bound: BoundPlan, run: DispatchRun) -> list[float]:
    backend = bound.executor.device.backend
    seconds = []
    current = None
    for pipeline, group, x, y, z in run.items:
        current = pipeline if pipeline is not None else current
        first = DispatchRun([(current, group, x, y, z)])
        backend.submit([first], bound.executor.plan.name)
        backend.wait()
        repeats = DispatchRun(first.items + [(None, group, x, y, z)] * (_REPEATS - 1))
        start = time.perf_counter()
        backend.submit([repeats], bound.executor.plan.name)
        backend.wait()
        seconds.append((time.perf_counter() - start) / _REPEATS)
    return seconds
