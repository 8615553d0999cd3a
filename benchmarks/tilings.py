"""Tilings of products, measured inside the models that have them.

    python -m benchmarks.tilings bert gpt2 vit           what each product gains, best first
    python -m benchmarks.tilings --write FILE bert …     … and adds what gains 0.3 % to FILE
    python -m benchmarks.tilings --small gpt2            on small sizes, to see that it runs

A kernel that is repeated finds its code and its operands in caches; in a model it does not. So each
candidate takes the place of its kernel in the whole plan, and the whole plan is timed. FILE is a
table of `autotune`, like those in ``torch_webgpu_compile/tunings``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_webgpu_compile import autotune, backend, plan_cache
from torch_webgpu_compile.backend import device_for
from torch_webgpu_compile.codegen.contraction import generate_tiled, problem_of
from torch_webgpu_compile.codegen.matmul_tiling import (
    MatmulProblem,
    MatmulTiling,
    choose_matmul_tiling,
    matmul_candidates,
)
from torch_webgpu_compile.errors import DeviceError
from torch_webgpu_compile.ir.graph import ContractionGroup, Schedule
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan.model import Dispatch, KernelCall, Plan
from torch_webgpu_compile.runtime.executor import BoundPlan, Executor

from . import cases
from .pytorch import build

_ROUNDS = 5
_ROUND_SECONDS = 0.025
_GAIN = 0.997


class Model:
    """A case, compiled, in which kernels can be replaced.

    Attributes:
        schedule: what its kernels are generated from.
        plan: what is timed.
    """

    def __init__(self, name: str, small: bool, known: Mapping[str, MatmulTiling]) -> None:
        self.device = device_for(resolve())
        self.target = self.device.target
        work = build(cases.CASES[name], small, 0.0, thorough=False)
        function, inputs = work.on_cpu()
        schedules: list[Schedule] = []
        bound: list[tuple[Executor, Any, Any]] = []
        bind, tuner = Executor.bind, backend.tuner

        def recorded(self: Executor, sizes: Any = None, externals: Any = None) -> BoundPlan:
            bound.append((self, sizes, externals))
            return bind(self, sizes, externals)

        def tune(schedule: Schedule) -> autotune.Tilings:
            schedules.append(schedule)
            return known

        plan_cache.clear()
        torch._dynamo.reset()
        Executor.bind = recorded  # type: ignore[method-assign]
        backend.tuner = lambda device, folder: tune  # type: ignore[attr-defined]
        try:
            with torch.no_grad():
                self.compiled = torch.compile(function, backend="webgpu", mode="max-autotune")
                self.compiled(*inputs)
        finally:
            Executor.bind = bind  # type: ignore[method-assign]
            backend.tuner = tuner  # type: ignore[attr-defined]
        executor, self.sizes, self.externals = bound[-1]
        self.schedule, self.plan = schedules[-1], executor.plan

    def seconds(self, plan: Plan) -> float:
        """Of one replay of a plan in a stream of them, the median of rounds."""
        replay = Executor(plan, self.device).bind(self.sizes, self.externals).replay
        replay()
        self.device.synchronize()
        found: list[float] = []
        calls = 1
        for _ in range(_ROUNDS + 1):
            start = time.perf_counter()
            for _ in range(calls):
                replay()
            self.device.synchronize()
            found.append((time.perf_counter() - start) / calls)
            calls = max(1, int(_ROUND_SECONDS / found[0]))
        return statistics.median(found[1:])

    def products(self) -> Iterator[tuple[MatmulProblem, ContractionGroup]]:
        """Each problem of known sizes once."""
        done = set()
        for group in autotune._contractions(self.schedule, self.target):
            problem = problem_of(group, self.schedule.graph.buffers, self.target)
            if problem.key is not None and problem.key not in done:
                done.add(problem.key)
                yield problem, group

    def call(
        self, problem: MatmulProblem, group: ContractionGroup, tiling: MatmulTiling
    ) -> KernelCall:
        """The kernel of a problem in a tiling."""
        return generate_tiled(group, self.schedule.graph.buffers, self.target, problem, tiling)

    def with_kernel(self, number: int, call: KernelCall) -> Plan:
        """The plan with another kernel in a place, which binds the same buffers."""
        kernels = list(self.plan.kernels)
        kernels[number] = call.kernel
        steps = tuple(
            replace(step, grid=call.grid, parameters=call.parameters)
            if isinstance(step, Dispatch) and step.kernel == number
            else step
            for step in self.plan.steps
        )
        return replace(self.plan, kernels=tuple(kernels), steps=steps)

    def measure(
        self, problem: MatmulProblem, group: ContractionGroup, current: MatmulTiling
    ) -> dict[MatmulTiling, float]:
        """Seconds of the model in each tiling, best first; empty if it has no such kernel."""
        now = self.call(problem, group, current)
        found = [k for k, kernel in enumerate(self.plan.kernels) if kernel.wgsl == now.kernel.wgsl]
        if not found:
            return {}
        times: dict[MatmulTiling, float] = {}
        for tiling in dict.fromkeys([current, *matmul_candidates(problem, self.target)]):
            call = self.call(problem, group, tiling)
            if [b.buffer for b in call.bindings] != [b.buffer for b in now.bindings]:
                continue
            try:
                times[tiling] = self.seconds(self.with_kernel(found[0], call))
            except DeviceError as error:
                print(f"    {tiling}: {error}")
        best = min(times, key=times.__getitem__)
        if times[best] < _GAIN * times[current]:
            self.plan = self.with_kernel(found[0], self.call(problem, group, best))
        return dict(sorted(times.items(), key=lambda item: item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="names of cases")
    parser.add_argument("--small", action="store_true", help="sizes for a software adapter")
    parser.add_argument("--write", type=Path, help="a table to add what gains to")
    arguments = parser.parse_args()
    known = dict(autotune.known_tilings(device_for(resolve()).target, None))
    if arguments.write is not None:
        known |= autotune._read(arguments.write)
    for name in arguments.models:
        model = Model(name, arguments.small, known)
        print(f"{name}: {model.seconds(model.plan) * 1e6:.1f} µs")
        for problem, group in model.products():
            current = known.get(problem.key or "") or choose_matmul_tiling(problem, model.target)
            times = model.measure(problem, group, current)
            if not times:
                continue
            print(f"  {problem.key}: {times[current] * 1e6:.1f} µs in {current}")
            for tiling, seconds in list(times.items())[:3]:
                print(f"    {seconds * 1e6:.1f} µs in {tiling}")
            best = next(iter(times))
            if times[best] < _GAIN * times[current]:
                known[problem.key or ""] = best
        print(f"{name}: {model.seconds(model.plan) * 1e6:.1f} µs")
        if arguments.write is not None:
            autotune._write(arguments.write, known)


if __name__ == "__main__":
    main()
