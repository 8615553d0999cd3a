"""Tilings of products, measured inside the models that have them.

    python -m benchmarks.tilings bert gpt2 vit           what each product gains, best first
    python -m benchmarks.tilings --write FILE bert …     … and adds what gains 0.3 % to FILE
    python -m benchmarks.tilings --small gpt2            on small sizes, to see that it runs

A kernel that is repeated finds its code and its operands in caches; in a model it does not. So each
candidate takes the place of its kernel in the whole plan, and the whole plan is timed. FILE is a
table of `autotune`, like those in ``torch_webgpu_compile/tuning/tables``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from torch_webgpu_compile import backend
from torch_webgpu_compile.codegen.kernels.contraction import generate_contraction
from torch_webgpu_compile.codegen.tilings.contraction import TilingTable, problem_of
from torch_webgpu_compile.codegen.tilings.matmul import (
    MatmulProblem,
    MatmulTiling,
    choose_matmul_tiling,
    matmul_candidates,
)
from torch_webgpu_compile.errors import DeviceError
from torch_webgpu_compile.ir.anchors import contraction_groups
from torch_webgpu_compile.ir.graph import ContractionGroup, Schedule
from torch_webgpu_compile.options import resolve
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan.model import Dispatch, KernelCall, Plan
from torch_webgpu_compile.runtime.device import device_for
from torch_webgpu_compile.runtime.executor import Executor
from torch_webgpu_compile.tuning import autotune

from . import cases
from .pytorch import build
from .timing import seconds_per_call
from .webgpu import given_memory, recorded_plans

_BUDGET_S = 0.15
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

        def tune(schedule: Schedule) -> TilingTable:
            schedules.append(schedule)
            return known

        plan_cache.clear()
        torch._dynamo.reset()
        tuner = backend.tuner
        backend.tuner = lambda device, folder: tune  # type: ignore[attr-defined]
        try:
            with torch.no_grad(), recorded_plans() as plans:
                self.compiled = torch.compile(function, backend="webgpu", mode="max-autotune")
                self.compiled(*inputs)
        finally:
            backend.tuner = tuner  # type: ignore[attr-defined]
        self.bound, self.schedule = plans[-1], schedules[-1]
        self.plan = self.bound.executor.plan

    def seconds(self, plan: Plan) -> float:
        """Of one replay of a plan, on the model's memory, in a stream of them."""
        executor = Executor(plan, self.device)
        replay = executor.bind(self.bound.sizes, given_memory(self.bound)).replay
        return seconds_per_call(replay, self.device.synchronize, _BUDGET_S)

    def products(self) -> Iterator[tuple[MatmulProblem, ContractionGroup]]:
        """Each problem of known sizes once."""
        done = set()
        for group in contraction_groups(self.schedule):
            problem = problem_of(group, self.schedule.graph.buffers)
            if problem.key is not None and problem.key not in done:
                done.add(problem.key)
                yield problem, group

    def call(self, group: ContractionGroup, tiling: MatmulTiling) -> KernelCall:
        """The kernel of a group in a tiling."""
        buffers = self.schedule.graph.buffers
        return generate_contraction(group, problem_of(group, buffers), buffers, self.target, tiling)

    def with_kernel(self, number: int, call: KernelCall) -> Plan:
        """The plan with another kernel in a place, which binds the same buffers."""
        kernels = list(self.plan.kernels)
        kernels[number] = call.kernel
        steps = tuple(
            replace(step, grid=call.step.grid, parameters=call.step.parameters)
            if isinstance(step, Dispatch) and step.kernel == number
            else step
            for step in self.plan.steps
        )
        return replace(self.plan, kernels=tuple(kernels), steps=steps)

    def measure(
        self, problem: MatmulProblem, group: ContractionGroup, current: MatmulTiling
    ) -> dict[MatmulTiling, float]:
        """Seconds of the model in each tiling, best first; empty if it has no such kernel.

        The plan goes on with the best one, if that gains.
        """
        now = self.call(group, current)
        found = [k for k, kernel in enumerate(self.plan.kernels) if kernel.wgsl == now.kernel.wgsl]
        if not found:
            return {}
        tilings = dict.fromkeys([current, *matmul_candidates(problem, self.target)])
        calls = {tiling: self.call(group, tiling) for tiling in tilings}
        with suppress(DeviceError):  # of a kernel that the driver refuses; the others are compiled
            self.device.pipelines.compile_many([call.kernel for call in calls.values()])
        times: dict[MatmulTiling, float] = {}
        for tiling, call in calls.items():
            if [b.buffer for b in call.step.bindings] != [b.buffer for b in now.step.bindings]:
                continue
            try:
                times[tiling] = self.seconds(self.with_kernel(found[0], call))
            except DeviceError as error:
                print(f"    {tiling}: {error}")
        for tiling in {current, best_of(times, current)}:  # the first of many is at no advantage
            times[tiling] = self.seconds(self.with_kernel(found[0], calls[tiling]))
        best = best_of(times, current)
        if best is not current:
            self.plan = self.with_kernel(found[0], calls[best])
        return dict(sorted(times.items(), key=lambda item: item[1]))


def best_of(times: Mapping[MatmulTiling, float], current: MatmulTiling) -> MatmulTiling:
    """The fastest tiling, or the current one if the fastest hardly gains."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < _GAIN * times[current] else current


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="names of cases")
    parser.add_argument("--small", action="store_true", help="sizes for a software adapter")
    parser.add_argument("--write", type=Path, help="a table to add what gains to")
    arguments = parser.parse_args()
    known = dict(autotune.known_tilings(device_for(resolve()).target, None))
    if arguments.write is not None and arguments.write.exists():
        known |= autotune.read_table(arguments.write)
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
            best = best_of(times, current)
            if best is not current:
                known[problem.key or ""] = best
        print(f"{name}: {model.seconds(model.plan) * 1e6:.1f} µs")
        if arguments.write is not None:
            autotune.write_table(arguments.write, known)


if __name__ == "__main__":
    main()
