"""What the compiler makes of the models whose first calls are measured; needs no GPU.

python -m benchmarks.kernel_counts [--target nvidia] [--small] [case …]    of `compile_cases`

A line has the pipelines that a model needs, forward and backward (kernels that differ), the bytes
of their WGSL, the dispatches of a call or step, and CPU seconds of making the plans, without
PyTorch's. What compiling the pipelines takes is measured by ``python -m benchmarks --suite
compile``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import CapturedGraph, Phase
from torch_webgpu_compile.compiler import compile_graph, native_operators
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan.model import Kernel, Plan
from torch_webgpu_compile.target import Target

from .compile_cases import COMPILED, CompileCase
from .random_weights import with_cheap_weights
from .targets import TARGETS


def pipeline_key(kernel: Kernel) -> tuple[str, tuple[bool, ...], bool]:
    """Kernels with the same one share a pipeline."""
    writable = tuple(binding.writable for binding in kernel.bindings)
    return kernel.wgsl, writable, kernel.parameter_count > 0


@dataclass
class Counts:
    """Of the plans of a model.

    Attributes:
        pipelines: keys of all kernels.
        dispatches: of a call, those that prepare weights included.
        seconds: of CPU time, from captured graphs to plans.
    """

    pipelines: set[Any] = field(default_factory=set)
    dispatches: int = 0
    seconds: float = 0.0

    def add(self, plan: Plan) -> None:
        """Counts another plan."""
        self.dispatches += plan.dispatch_count
        if plan.preparation is not None:
            self.dispatches += plan.preparation.dispatch_count
        for part in plan.all_plans:
            self.pipelines |= set(map(pipeline_key, part.kernels))

    @property
    def wgsl_nbytes(self) -> int:
        """Of all pipelines."""
        return sum(len(wgsl.encode()) for wgsl, *_ in self.pipelines)


def counts(case: CompileCase, target: Target, small: bool) -> Counts:
    """Compiles a model; on fake tensors, or on real ones where its own code reads values."""
    try:
        return _counts(case, target, small, FakeTensorMode(allow_non_fake_inputs=True))
    except DataDependentOutputException:
        return _counts(case, target, small, nullcontext())


def _counts(case: CompileCase, target: Target, small: bool, mode: Any) -> Counts:
    found = Counts()

    def compile_captured(captured: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        start = time.process_time()
        found.add(compile_graph(captured, phase, target, CompileOptions(), use_cache=False).plan)
        found.seconds += time.process_time() - start
        return partial(_results_like, captured, phase)

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return aot.capture(module, inputs, compile_captured, native_operators())

    torch._dynamo.reset()
    with mode:
        module, inputs = with_cheap_weights(partial(case.build, small))
        case.run(module, inputs, backend)()
    return found


def _results_like(captured: CapturedGraph, phase: Phase, arguments: list[Any]) -> list[Any]:
    """Tensors like a graph's results, of zeros."""
    given = dict(phase.forwarded)

    def results() -> Iterator[Any]:
        for position, node in enumerate(captured.module.graph.output_node().args[0]):
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
            if position in given:
                yield arguments[given[position]]
            elif isinstance(value, Tensor):
                yield torch.zeros(value.shape, dtype=value.dtype)
            else:
                yield value

    found = list(results())
    arguments.clear()
    return found


def main() -> None:
    """Prints every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(COMPILED)}")
    parser.add_argument("--target", default="nvidia", choices=TARGETS)
    parser.add_argument("--small", action="store_true", help="sizes for software adapters")
    arguments = parser.parse_args()
    torch.backends.mkldnn.set_flags(False)
    print("| | pipelines | kB of WGSL | dispatches | CPU seconds of planning |", flush=True)
    print("|---" * 5 + "|")
    for name in arguments.cases or COMPILED:
        found = counts(COMPILED[name], TARGETS[arguments.target], arguments.small)
        kilobytes = found.wgsl_nbytes / 1e3
        print(
            f"| {name} | {len(found.pipelines)} | {kilobytes:.0f} | {found.dispatches} "
            f"| {found.seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
