"""Time per dispatch of a bound plan."""

from __future__ import annotations

from .executor import BoundPlan
from .interface import DispatchRun
from .queue import time_on_host
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
                spans = backend.submit_timed(command, name)
                spans = spans or time_on_host(backend, command, name, _REPEATS)
                measured += [end - start for start, end in spans]
    seconds = [0.0] * executor.plan.dispatch_count
    for step, value in zip(bound.program.dispatch_steps, measured, strict=True):
        seconds[step] = value
    return seconds
