"""Captures functions as `CapturedGraph`s and runs them through lowering and the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

from torch_webgpu_compile.backend import native_operators
from torch_webgpu_compile.capture.decompositions.table import decompositions
from torch_webgpu_compile.captured import CapturedGraph
from torch_webgpu_compile.host_steps.host_calls import call_overload, laid_out
from torch_webgpu_compile.ir.graph import LoopGraph, is_effect
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.ir.nodes import HostCall
from torch_webgpu_compile.ir.verify import verify_loop_graph
from torch_webgpu_compile.lowering.graph import lower
from torch_webgpu_compile.symbolic.nested import HostBuffer
from torch_webgpu_compile.target import Target

_NAMES = count()
TARGET = Target()


def capture(
    fn: Callable[..., Any], *args: Any, dynamic: bool = False, decompose: bool = True
) -> CapturedGraph:
    """Traces ``fn`` on fake tensors; with ``dynamic``, every size of 2 or more is symbolic."""
    mode = "symbolic" if dynamic else "fake"
    table = decompositions(native_operators()) if decompose else {}

    def flat(*inner: Any) -> Any:
        return torch.utils._pytree.tree_leaves(fn(*inner))

    with_grad = any(_wants_grad(a) for a in args)
    traced = flat if with_grad else torch.func.functionalize(flat, remove="mutations")
    with torch.set_grad_enabled(with_grad):
        module = make_fx(
            traced, decomposition_table=table, tracing_mode=mode, _allow_non_fake_inputs=True
        )(*args)
    if any(is_mutation(node) for node in module.graph.nodes):  # from a decomposition
        with torch.no_grad():
            again = torch.func.functionalize(module, remove="mutations")
            module = make_fx(again, tracing_mode=mode, _allow_non_fake_inputs=True)(*args)
    return CapturedGraph(f"graph{next(_NAMES)}", module, frozenset())


def aot_capture(
    fn: Callable[..., Any], *args: Any, dynamo: Callable[..., Any] | None = None
) -> tuple[CapturedGraph, list[CapturedGraph]]:
    """Captures as the backend does, through AOTAutograd; with ``dynamo``, that function by Dynamo.

    Returns the first graph and all of them.
    """
    graphs: list[CapturedGraph] = []

    def keep(captured: CapturedGraph) -> Callable[..., Any]:
        graphs.append(captured)
        return captured.module.forward

    with torch.no_grad():
        if dynamo is not None:
            torch._dynamo.reset()
            torch.compile(dynamo, backend=backend_of(keep), fullgraph=True)(*args)
        else:
            aot_function(fn, **_aot_options(keep))(*args)
    return graphs[0], graphs


def _aot_options(make: Callable[[CapturedGraph], Callable[..., Any]]) -> dict[str, Any]:
    def compiler(module: torch.fx.GraphModule, examples: Any) -> Any:
        captured = CapturedGraph(f"graph{next(_NAMES)}", module, frozenset())
        return make_boxed_func(make(captured))

    return {
        "fw_compiler": compiler,
        "bw_compiler": compiler,
        "inference_compiler": compiler,
        "decompositions": decompositions(native_operators()),
        "keep_inference_input_mutations": True,
    }


def backend_of(make: Callable[[CapturedGraph], Callable[..., Any]]) -> Any:
    """A Dynamo backend that turns each captured graph into a function with ``make``."""
    return aot_autograd(partition_fn=min_cut_rematerialization_partition, **_aot_options(make))


def interpreting_backend(*, allow_host: bool = False) -> Any:
    """A Dynamo backend that lowers, verifies and interprets every graph."""

    def make(captured: CapturedGraph) -> Callable[..., Any]:
        graph = lower_checked(captured, allow_host=allow_host)

        def run(*args: Any) -> list[Any]:
            results, mutations = run_with_mutations(graph, args)
            for position, value in mutations.items():
                args[position].copy_(value)
            return results

        return run

    return backend_of(make)


def _wants_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_mutation(node: torch.fx.Node) -> bool:
    """Whether a node writes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def to_array(value: Any) -> Any:
    """A NumPy array with the tensor's strides; bfloat16 as float32."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()


def to_tensor(array: Any, like: torch.dtype) -> Any:
    """A tensor of the array's values and strides."""
    if not isinstance(array, np.ndarray):
        return array
    tensor = torch.from_numpy(np.array(array, copy=False))
    if tensor.dtype is like:
        return tensor
    memory = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    out = torch.zeros(max(memory, 0) if tensor.numel() else 0, dtype=like)
    flat = torch.as_strided(tensor, out.shape, (1,)) if tensor.numel() else tensor.reshape(-1)
    out.copy_(flat)
    return out.as_strided(tensor.shape, tensor.stride())


def host_callback(graph: LoopGraph) -> Callable[..., Any]:
    """Runs host calls with PyTorch on CPU."""

    def run(call: HostCall, arrays: Any, sizes: Any) -> Any:
        def tensor(argument: HostBuffer) -> torch.Tensor:
            dtype = getattr(torch, graph.buffers[argument.buffer].dtype.name)
            found = to_tensor(arrays[argument.buffer].copy(), dtype)
            return laid_out(found, argument.strides, sizes)

        count = 0 if is_effect(call, graph) else len(call.outputs)
        results = call_overload(call, tensor, sizes, count)
        return [to_array(result) for result in results]

    return run


def lower_checked(
    captured: CapturedGraph,
    *,
    allow_host: bool = False,
    target: Target = TARGET,
    deterministic: bool = False,
) -> LoopGraph:
    """Lowers and verifies; a host call fails unless it is expected."""
    fallbacks: list[str] = []

    def on_fallback(op: str, dtype: str, source: str, cause: str) -> None:
        fallbacks.append(f"{op} ({dtype}): {cause}")

    graph = lower(captured, target, on_fallback, deterministic=deterministic)
    verify_loop_graph(graph)
    assert allow_host or not fallbacks, fallbacks
    return graph


def run_graph(graph: LoopGraph, args: Sequence[Any]) -> list[Any]:
    """Interprets a graph on tensors; gives results with the promised strides."""
    return run_with_mutations(graph, args)[0]


def run_with_mutations(
    graph: LoopGraph, args: Sequence[Any]
) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Interprets a graph on tensors; gives its results, and new values of inputs by position."""
    arrays = interpret(graph, [to_array(a) for a in args], host_callback(graph))
    results: list[Any] = []
    mutations = {}
    for array, output in zip(arrays, graph.outputs, strict=True):
        value = array
        if output.buffer is not None:
            dtype = graph.buffers[output.buffer].dtype
            value = to_tensor(array, getattr(torch, dtype.name))
        if output.mutates is None:
            results.append(value)
        else:
            mutations[output.mutates] = value
    return results, mutations


def check(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
    decompose: bool = True,
    allow_host: bool = False,
    target: Target = TARGET,
    deterministic: bool = False,
    **tolerance: Any,
) -> LoopGraph:
    """Compares eager with lowered and interpreted, strides included; returns the graph."""
    captured = capture(fn, *args, dynamic=dynamic, decompose=decompose)
    graph = lower_checked(
        captured, allow_host=allow_host, target=target, deterministic=deterministic
    )
    flat_args = torch.utils._pytree.tree_leaves(args)
    actual = run_graph(graph, flat_args)
    if not dynamic:
        check_strides(captured, actual)
    with torch.set_grad_enabled(any(_wants_grad(a) for a in args)):
        expected = torch.utils._pytree.tree_leaves(fn(*args))
    compare(actual, expected, **tolerance)
    return graph


def check_strides(captured: CapturedGraph, actual: Sequence[Any]) -> None:
    """Outputs have the strides that tracing promised, except of dimensions of size 1."""
    (output,) = (n for n in captured.module.graph.nodes if n.op == "output")
    for got, node in zip(actual, output.args[0], strict=False):
        if isinstance(got, torch.Tensor) and got.numel():
            fake = node.meta["val"]
            for size, stride, wanted in zip(got.shape, got.stride(), fake.stride(), strict=True):
                assert size == 1 or stride == wanted, (got.stride(), fake.stride())


def compare(actual: Sequence[Any], expected: Sequence[Any], **tolerance: Any) -> None:
    """Values at PyTorch's tolerances, dtypes, sizes."""
    assert len(actual) == len(expected), (len(actual), len(expected))
    for got, wanted in zip(actual, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(got, wanted.detach(), equal_nan=True, **tolerance)
        else:
            assert got == wanted or (got != got and wanted != wanted), (got, wanted)
