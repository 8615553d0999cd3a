"""Eager PyTorch and Inductor, on CUDA where it is, else on the CPU."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .goals import kernel_seconds
from .kernel_cases import Case
from .limits import synchronize, torch_device, use_full_f32
from .timing import seconds, seconds_per_call

_CALLS_PER_GRAPH = 8


@dataclass
class Workload:
    """A case, built.

    Attributes:
        function, inputs: on PyTorch's device.
        nbytes_before: of CUDA memory that was allocated before it was built.
        budget_s: for each timing.
        thorough: also what no goal asks for.
    """

    case: Case
    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    nbytes_before: int
    budget_s: float
    thorough: bool

    def on_cpu(self) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        """A copy of the model and the inputs on the CPU."""
        function = self.function
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function).to("cpu")
        return function, tuple(x.cpu() for x in self.inputs)

    def weights_nbytes(self) -> int:
        """Of the parameters, each once."""
        if not isinstance(self.function, nn.Module):
            return 0
        return sum(parameter.nbytes for parameter in self.function.parameters())


def build(case: Case, small: bool, budget_s: float, thorough: bool) -> Workload:
    """Random weights and inputs are made where they are used: a GPU is faster at it."""
    use_full_f32()
    gc.collect()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    torch.manual_seed(0)
    with torch.device(torch_device()):
        function, inputs = case.build(small)
    if isinstance(function, nn.Module):
        function = function.to(torch_device())
    inputs = tuple(x.to(torch_device()) for x in inputs)
    return Workload(case, function, inputs, before, budget_s, thorough)


def measure_eager(work: Workload) -> dict[str, Any]:
    """Of the case's variants, the fastest; ``gpu_nbytes`` is the peak of one call, weights and
    inputs included."""
    use_full_f32()
    result: dict[str, Any] = {}
    with torch.no_grad():
        if torch.cuda.is_available():
            work.function(*work.inputs)
            torch.cuda.reset_peak_memory_stats()
            work.function(*work.inputs)
            result["gpu_nbytes"] = torch.cuda.max_memory_allocated() - work.nbytes_before
        if work.case.variants is None:
            return result | _times(work, lambda: work.function(*work.inputs))
        found: dict[str, Any] = {}
        for name, function, inputs in work.case.variants(work.function, work.inputs):
            try:
                found[name] = _times(work, lambda f=function, x=inputs: f(*x))
            except RuntimeError as error:
                found[name] = {"error": str(error)[:200]}
    measured = [times for times in found.values() if "error" not in times]
    if not measured:
        raise RuntimeError(f"no variant runs: {found}")
    return result | min(measured, key=kernel_seconds) | {"variants": found}


def _times(work: Workload, call: Callable[[], object]) -> dict[str, float]:
    times = {"seconds": seconds_per_call(call, synchronize, work.budget_s)}
    # A model's time is that of a user's call; a kernel's should not contain the host's.
    if torch.cuda.is_available() and not isinstance(work.function, nn.Module):
        gpu_s = graph_seconds(call, work.budget_s)
        if gpu_s is not None:
            times["gpu_s"] = gpu_s
    return times


def graph_seconds(call: Callable[[], object], budget_s: float) -> float | None:
    """Seconds of a call on the GPU, from replays of a CUDA graph of several: nothing of the host
    is between them. None where the call cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(_CALLS_PER_GRAPH):
                call()
    except RuntimeError:
        synchronize()
        return None
    return seconds_per_call(graph.replay, synchronize, budget_s) / _CALLS_PER_GRAPH


def measure_compiled(work: Workload, mode: str | None = None) -> dict[str, Any]:
    """Inductor; ``mode="reduce-overhead"`` is CUDA graphs.

    ``compile_again_s``: the same once more in this process, with Inductor's caches filled.
    """
    use_full_f32()
    result: dict[str, Any] = {}
    names = ("first_call_s", "compile_again_s") if work.thorough else ("first_call_s",)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32")  # off on purpose
        for name in names:
            torch._dynamo.reset()
            compiled = torch.compile(work.function, mode=mode)

            def call(compiled: Callable[..., Any] = compiled) -> None:
                torch.compiler.cudagraph_mark_step_begin()
                compiled(*work.inputs)

            result[name] = seconds(lambda call=call: (call(), synchronize()))
        if mode is not None:  # it captures graphs itself
            return result | {"seconds": seconds_per_call(call, synchronize, work.budget_s)}
        return result | _times(work, call)
