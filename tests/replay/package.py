"""All that replays ask of the package.

Recordings of a commit that has this file use its own, so that what moves within the package is
changed here and nowhere else. It therefore imports nothing of `tests`, and keeps these functions:
`prepare`, `target_of`, `backend`, `graph_of_call`, `compiled`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_webgpu_compile.callables.signature import bound_offset
from torch_webgpu_compile.capture.eager.calls import TensorSpec
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import CapturedGraph, Phase
from torch_webgpu_compile.compiler import compile_graph, host_numbers, native_operators, passes
from torch_webgpu_compile.errors import UnsupportedOp
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.plan import serialize
from torch_webgpu_compile.plan.model import HostStep, Plan
from torch_webgpu_compile.target import Machine, Target


@dataclass(frozen=True)
class Graph:
    """What capture gives, and the options that it is compiled with."""

    captured: CapturedGraph
    phase: Phase
    options: CompileOptions


def prepare() -> None:
    """Defines what programs may call without importing it."""
    native_operators()


def target_of(fields: Mapping[str, Any]) -> Target:
    """An adapter.

    Args:
        fields: those that are not as `Target` has them by default, as JSON. Raises TypeError for a
            field that `Target` does not have.
    """

    def made(value: Any) -> Any:
        return tuple(map(made, value)) if isinstance(value, list) else value

    values = {name: made(value) for name, value in fields.items()}
    if "features" in values:
        values["features"] = frozenset(values["features"])
    if "machine" in values:
        values["machine"] = Machine(**values["machine"])
    return Target(**values)


def backend(found: Callable[[Graph], None], refused: Callable[[str], None]) -> Callable[..., Any]:
    """A backend of Dynamo.

    Args:
        found: told of each graph, whose results are zeros.
        refused: told why a graph is left to PyTorch.
    """

    def compile_captured(captured: CapturedGraph, phase: Phase) -> aot.BoxedFunction:
        found(Graph(captured, phase, CompileOptions()))
        return lambda arguments: _results(captured, phase, arguments)

    def on_host(op: str, dtype: str, source: str, cause: str) -> None:
        refused(f"{op} ({dtype}): {cause}")

    def plan(captured: CapturedGraph, phase: Phase) -> Plan:
        found(Graph(captured, phase, CompileOptions()))
        return compile_graph(captured, phase, Target(), CompileOptions(), use_cache=False).plan

    def composed(plan: Plan, phase: Phase, static: frozenset[int]) -> aot.BoxedFunction:
        def call(arguments: list[Any]) -> list[Any]:
            raise UnsupportedOp(plan.name, "its results are decided by data", "there is none here")

        return call

    def compile_module(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        hooks = aot.Hooks(on_host=on_host, host_numbers=host_numbers, plan=plan, composed=composed)
        return aot.capture(module, inputs, compile_captured, native_operators(), hooks)

    return compile_module


def _results(captured: CapturedGraph, phase: Phase, arguments: list[Any]) -> list[Any]:
    """Tensors like the graph's results, of zeros."""
    given = dict(phase.forwarded)
    (output,) = captured.module.graph.find_nodes(op="output")
    results: list[Any] = []
    for position, node in enumerate(output.args[0]):
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if position in given:
            value = arguments[given[position]]
        elif isinstance(value, Tensor):
            value = torch.zeros([int(size) for size in value.shape], dtype=value.dtype)
            if position in phase.complex_outputs:
                value = torch.view_as_complex(value)
        elif isinstance(value, torch.SymInt):
            value = int(value)
        results.append(value)
    return results


def describe(value: Any) -> Any:
    """The same structure with a `TensorSpec` for each tensor."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        memory = leaf.untyped_storage()._cdata
        layout = tuple(leaf.shape), leaf.stride(), bound_offset(leaf)
        return TensorSpec(leaf.dtype, *layout, memory, leaf.is_conj(), leaf.is_neg())

    return tree_map(spec, value)


def graph_of_call(op: Any, args: Any, kwargs: Any, *, dynamic: bool) -> Graph | None:
    """The graph of an eager call; None where there is none, as it runs on the host, for example.

    Args:
        dynamic: with symbols for sizes and numbers.
    """
    described = describe((args, kwargs))
    try:
        call = capture_call(op, *described, native_operators(), dynamic=dynamic)
    except UnsupportedOp:
        return None
    if dynamic and call.resized:  # these sizes have to be known
        return None
    memories = [leaf.memory for leaf in tree_leaves(described) if isinstance(leaf, TensorSpec)]
    in_place = bool(call.mutated) and len(set(memories)) == len(memories)
    options = CompileOptions(fallback="error", in_place=in_place)
    return Graph(call.captured, call.phase, options)


def compiled(graph: Graph, target: Target) -> tuple[dict[str, str | None], dict[str, int]]:
    """What compiling a graph for an adapter gives.

    Returns:
        The text of each stage in order, None for that of a pass that changed nothing; and counts of
        what the plan has.
    """
    captured, options = graph.captured, graph.options
    stages: dict[str, str | None] = {"fx": captured.text}
    try:
        state = compile_graph(captured, graph.phase, target, options, use_cache=False)
    except Exception as error:
        return {**stages, "error": f"{type(error).__name__}: {error}"}, {}
    before: Any = captured
    for step in passes(state.options):
        if step.name in state.results:
            result = state.results[step.name]
            stages[step.name] = None if result is before else step.gives.text(result)
            before = result
    plan = json.dumps(serialize.to_json(state.plan), indent=1, ensure_ascii=False)
    stages["serialized"] = plan.replace("\\n", "\n")  # kernels are lines
    return stages, _counts(state.plan)


def _counts(plan: Plan) -> dict[str, int]:
    parts = [part for part in (plan.preparation, plan) if part is not None]
    kernels = [kernel for part in parts for kernel in part.kernels]
    return {
        "kernels": len(kernels),
        "dispatches": sum(part.dispatch_count for part in parts),
        "host steps": sum(isinstance(step, HostStep) for part in parts for step in part.steps),
        "bytes of WGSL": sum(len(kernel.wgsl.encode()) for kernel in kernels),
    }
