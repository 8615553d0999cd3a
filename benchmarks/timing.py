"""Time of a call, when calls overlap with the device's work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_BATCHES = 5


def seconds_per_call(
    call: Callable[[], object], synchronize: Callable[[], None], budget_s: float = 1.0
) -> float:
    """Median over batches of (calls, then one synchronize) / calls.

    The time of a steady stream of calls: the host works ahead of the device, as in real use. Takes
    about ``budget_s`` seconds; calls that are slower than that are timed one by one, three times.
    """
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    once = max(time.perf_counter() - start, 1e-7)
    calls = max(1, min(2000, int(budget_s / _BATCHES / once)))
    for _ in range(2 if once < budget_s else 0):
        call()
    batches = []
    for _ in range(_BATCHES if once < budget_s else 3):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        batches.append((time.perf_counter() - start) / calls)
    return statistics.median(batches)


def marginal_seconds_per_call(
    call: Callable[[], object], finish: Callable[[], object], budget_s: float = 1.0
) -> float:
    """Median of (time of 2 n calls − time of n calls) / n, each followed by ``finish``.

    For systems whose only way to wait is to copy a result to the host: that copy cancels out.
    """

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        finish()
        return time.perf_counter() - start

    batch(2)
    calls = max(1, min(1000, int(budget_s / (3 * _BATCHES) / max(batch(1), 1e-7))))
    found = [(batch(2 * calls) - batch(calls)) / calls for _ in range(_BATCHES)]
    return max(statistics.median(found), 1e-9)  # noise may exceed a tiny call


def host_seconds_per_call(
    call: Callable[[], object], synchronize: Callable[[], None], calls: int = 20
) -> float:
    """Median time that the host spends in a call that only submits work."""
    times = []
    for _ in range(_BATCHES):
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        synchronize()
    return statistics.median(times)


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
