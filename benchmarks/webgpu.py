"""This package: a compiled model's plan, replayed on its own GPU buffers.

``torch.compile`` is called as a user calls it, with CPU tensors. For the time on the GPU alone, the
plan that it bound is replayed without moving inputs or outputs.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torch_webgpu_compile  # registers the backend where the package is not installed
from torch_webgpu_compile import stages
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan.model import Dispatch
from torch_webgpu_compile.runtime.buffers import AnyBuffer
from torch_webgpu_compile.runtime.device import Device, device_for
from torch_webgpu_compile.runtime.executor import BoundPlan, Executor
from torch_webgpu_compile.runtime.profiler import time_steps
from torch_webgpu_compile.symbolic.sizes import evaluate

from .pytorch import Workload
from .timing import host_seconds_per_call, seconds, seconds_per_call


@contextmanager
def recorded_plans() -> Iterator[list[BoundPlan]]:
    """The plans that are bound while the context is entered, one per compiled graph, in order."""
    found: dict[int, BoundPlan] = {}
    original = Executor.bind

    def bind(self: Executor, *args: Any, **kwargs: Any) -> BoundPlan:
        bound = original(self, *args, **kwargs)
        found[id(self)] = bound
        return bound

    plans: list[BoundPlan] = []
    Executor.bind = bind  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        Executor.bind = original  # type: ignore[method-assign]
        plans += found.values()


def given_memory(bound: BoundPlan) -> dict[str, AnyBuffer]:
    """What a plan reads that is no result of its steps, by name: memory for another such plan."""
    buffers, given = bound.executor.plan.buffers, ("input", "prepared")
    return {name: found for name, found in bound.memory.items() if buffers[name].role in given}


def traffic(bound: BoundPlan) -> dict[str, int]:
    """Least bytes and arithmetic of one replay, as the compiler counts them."""
    sizes = bound.sizes
    totals = {"bytes_read": 0, "bytes_written": 0, "flops": 0}
    for step in bound.executor.plan.steps:
        if isinstance(step, Dispatch):
            for name in totals:
                totals[name] += evaluate(getattr(step, name), sizes)
    return totals


def slowest_kernels(bound: BoundPlan, step_seconds: list[float], count: int = 8) -> list[Any]:
    """(kernel, dispatches, seconds) of the kernels that take the most time."""
    plan = bound.executor.plan
    dispatches = [step for step in plan.steps if isinstance(step, Dispatch)]
    totals: dict[str, tuple[int, float]] = {}
    for step, value in zip(dispatches, step_seconds, strict=True):
        name = plan.kernels[step.kernel].name
        number, total = totals.get(name, (0, 0.0))
        totals[name] = number + 1, total + value
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return [[name, number, total] for name, (number, total) in ordered[:count]]


def largest_difference(actual: Any, expected: Any) -> float:
    """Largest absolute difference, relative to the largest magnitude."""
    worst = 0.0
    for ours, theirs in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(ours, Tensor) and ours.is_floating_point():
            scale = max(float(theirs.abs().max()), 1e-30)
            difference = float((ours.to(theirs.device) - theirs).abs().max()) / scale
            worst = difference if math.isnan(difference) else max(worst, difference)
    return worst


def measure(work: Workload, mode: str | None = None) -> dict[str, Any]:
    """All figures of one case; times in seconds."""
    counters = torch_webgpu_compile.counters
    function, inputs = work.on_cpu()
    with torch.no_grad():
        expected = work.function(*work.inputs)
    result: dict[str, Any] = {}
    device = device_for(resolve())
    nbytes_before = _allocated_nbytes(device)
    sums = stages.Sums()
    with torch.no_grad(), recorded_plans() as plans, stages.telling(sums):
        counters.reset()
        compiled = torch.compile(function, backend="webgpu", mode=mode)
        actual: list[Any] = []
        result["first_call_s"] = seconds(lambda: actual.append(compiled(*inputs)))
        result["kernels"] = counters.kernels_compiled
        result["fallbacks"] = dict(counters.fallbacks)
        result["relative_difference"] = largest_difference(actual.pop(), expected)
        del expected
        if isinstance(function, nn.Module):  # the first call also has what compiling needs
            device.pool.reset_peak()
            compiled(*inputs)
        result["gpu_nbytes"] = device.pool.stats()["peak_allocated"] - nbytes_before
    assert len(plans) == 1, f"{len(plans)} graphs: a case must be a single graph"
    bound = plans[0]
    result["weights_nbytes"] = work.weights_nbytes()
    result["driver_compile_s"] = sum(sums.own("pipeline").values())  # over threads
    result["dispatches"] = bound.dispatch_count
    result |= traffic(bound) | replays(bound, device, work.budget_s)
    if not work.thorough:
        return result

    with torch.no_grad():
        call = seconds_per_call(lambda: compiled(*inputs), lambda: None, work.budget_s)
        result["call_with_transfers_s"] = call
        if work.case.extra:
            extra = EXTRAS[work.case.extra]
            result |= extra(function, inputs, bound, call, work.budget_s)
        torch._dynamo.reset()
        again = torch.compile(function, backend="webgpu", mode=mode)
        result["compile_again_s"] = seconds(lambda: again(*inputs))
    return result


def _allocated_nbytes(device: Device) -> int:
    """Without what earlier cases left, and with the peak set back to it."""
    gc.collect()
    device.empty_cache()
    device.pool.reset_peak()
    return device.pool.stats()["allocated"]


def replays(bound: BoundPlan, device: Device, budget_s: float) -> dict[str, Any]:
    """The plan alone, on buffers that stay on the GPU."""
    result: dict[str, Any] = {}
    result["seconds"] = seconds_per_call(bound.replay, device.synchronize, budget_s)

    def submit() -> None:
        bound.replay()
        device.queue.flush()

    calls = max(1, min(20, int(budget_s / result["seconds"] / 5)))
    replay_s = host_seconds_per_call(submit, device.synchronize, calls)
    result["host_replay_s"] = replay_s
    result["host_s_per_dispatch"] = replay_s / max(1, bound.dispatch_count)
    step_seconds = gpu_seconds_of_steps(bound, budget_s)
    result["gpu_s"] = sum(step_seconds)
    result["slowest_kernels"] = slowest_kernels(bound, step_seconds)
    return result


def gpu_seconds_of_steps(bound: BoundPlan, budget_s: float, rounds: int = 5) -> list[float]:
    """Of each dispatch, the median of rounds; a slow adapter gets fewer of them."""
    found = []
    start = time.perf_counter()
    while len(found) < rounds and (not found or time.perf_counter() - start < budget_s):
        found.append(time_steps(bound))
    return [statistics.median(times) for times in zip(*found, strict=True)]


def call_overhead(
    function: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    bound: BoundPlan,
    call_s: float,
    budget_s: float,
) -> dict[str, float]:
    """What a call costs beyond Dynamo's floor and beyond moving data and replaying.

    ``floor_s``: the same function with a backend that returns a constant. ``device_s``: upload of
    the inputs, replay and download of the outputs, straight through the runtime.
    """
    with torch.no_grad():
        outputs = tree_leaves(function(*inputs))

        def constant_backend(graph: Any, example_inputs: Any) -> Callable[..., Any]:
            return lambda *args: tuple(outputs)

        torch._dynamo.reset()
        empty = torch.compile(function, backend=constant_backend)
        floor = seconds_per_call(lambda: empty(*inputs), lambda: None, budget_s)

    device, plan = bound.executor.device, bound.executor.plan
    names = [output.buffer for output in plan.outputs if output.buffer is not None]
    arrays = [np.empty(x.nbytes, np.uint8) for x in outputs]
    uploads = [
        (buffer, np.zeros(buffer.nbytes, np.uint8)) for buffer in moved_inputs(bound, inputs)
    ]

    def through_the_runtime() -> None:
        for buffer, data in uploads:
            device.upload(buffer, data)
        bound.replay()
        ranges = zip(names, arrays, strict=True)
        device.download_many(
            [(bound.buffer(n), 0, a.nbytes, a.__array_interface__["data"][0]) for n, a in ranges]
        )

    device_s = seconds_per_call(through_the_runtime, lambda: None, budget_s)
    return {"floor_s": floor, "device_s": device_s, "overhead_s": call_s - floor - device_s}


def moved_inputs(bound: BoundPlan, inputs: tuple[Tensor, ...]) -> list[Any]:
    """The GPU buffers of the last inputs: parameters come first and do not move."""
    names = [x.buffer for x in bound.executor.plan.inputs if x.buffer is not None]
    return [bound.buffer(name) for name in names[-len(inputs) :]]


EXTRAS = {"call_overhead": call_overhead}
