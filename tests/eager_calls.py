"""Captures single operator calls from real tensors, and runs them on the interpreter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.harness import compare, host_callback, lower_checked, to_array, to_tensor
from tests.replay.package import describe
from torch_webgpu_compile.callables.signature import bound_offset
from torch_webgpu_compile.capture.eager.calls import CapturedCall, Constant, ResultArgument
from torch_webgpu_compile.capture.eager.capture import capture_call
from torch_webgpu_compile.compiler import native_operators
from torch_webgpu_compile.ir.graph import LoopGraph
from torch_webgpu_compile.ir.interpret import interpret
from torch_webgpu_compile.symbolic.sizes import Symbol


def bound_memory(tensor: Tensor) -> Any:
    """The flat memory that a tensor's binding sees, as an array."""
    start = tensor.storage_offset() - bound_offset(tensor)
    count = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    memory = torch.empty(0, dtype=tensor.dtype)
    memory.set_(tensor.untyped_storage(), start, (count,), (1,))
    return to_array(torch.view_as_real(memory).view(-1) if tensor.is_complex() else memory)


def symbol_values(graph: LoopGraph, call: CapturedCall, leaves: list[Any]) -> dict[str, int]:
    """The values of a graph's symbols for a call."""
    found: dict[str, int] = {}
    for leaf, entry in zip(call.arguments, graph.inputs, strict=False):
        value = leaves[leaf]
        places = [(entry.size, value)]
        if entry.buffer is not None:
            buffer = graph.buffers[entry.buffer]
            unit = 2 if value.is_complex() else 1
            places = [(buffer.offset, unit * bound_offset(value))]
            if leaf not in call.resized:  # else the call decides the sizes and strides
                places += zip(buffer.sizes, value.shape, strict=False)
                places += zip(buffer.strides, [unit * s for s in value.stride()], strict=False)
        for expr, number in places:
            for name, known in _symbol(expr, number):
                assert found.setdefault(name, known) == known
    return found


def _symbol(expr: Any, number: int) -> list[tuple[str, int]]:
    """The symbol whose multiple an expression is, with its value."""
    if expr is None or len(expr.terms) != 1 or expr.constant or len(expr.terms[0][0]) != 1:
        return []
    (atom,), factor = expr.terms[0]
    return [(atom.name, number // factor)] if isinstance(atom, Symbol) else []


def _as_complex(pairs: Tensor) -> Tensor:
    if pairs.numel():
        return torch.view_as_complex(pairs)
    return torch.empty(pairs.shape[:-1], dtype=pairs.dtype.to_complex())  # of any strides


def run_call(
    call: CapturedCall,
    leaves: list[Any],
    *,
    allow_host: bool = False,
    rewrite: Callable[[LoopGraph], LoopGraph] = lambda graph: graph,
) -> Any:
    """Lowers and interprets; changes tensors among ``leaves``; gives what the call returns."""
    graph = rewrite(lower_checked(call.captured, allow_host=allow_host))
    arguments = [
        bound_memory(leaves[k]) if isinstance(leaves[k], Tensor) else leaves[k]
        for k in call.arguments
    ]
    if call.numbers is not None:
        held_in = np.float64 if call.numbers.dtype is torch.float64 else np.float32
        arguments.append(np.frombuffer(call.numbers.compute(leaves), held_in))
    if call.phase.seeds:
        arguments.append(np.arange(1, 2 * call.phase.seeds + 1, dtype=np.int32).reshape(-1, 2))
    arrays = interpret(graph, arguments, host_callback(graph), symbol_values(graph, call, leaves))
    outputs, changes = [], []
    for array, output in zip(arrays, graph.outputs, strict=True):
        value = array
        if output.buffer is not None:
            value = to_tensor(array, getattr(torch, graph.buffers[output.buffer].dtype.name))
        if output.mutates is None:
            is_complex = len(outputs) in call.phase.complex_outputs
        else:
            is_complex = output.mutates in call.phase.complex_inputs
        value = _as_complex(value) if is_complex else value
        if output.mutates is None:
            outputs.append(value)
        else:
            changes.append((leaves[call.arguments[output.mutates]], value))
    for leaf in call.resized:
        target = leaves[leaf]
        target.set_(next(torch.empty_like(value) for t, value in changes if t is target))
    for target, value in changes:
        assert target.stride() == value.stride() or target.numel() < 2
        target.copy_(value)
    flat = []
    for result in call.results:
        match result:
            case ResultArgument(leaf):
                flat.append(leaves[leaf])
            case Constant(value):
                flat.append(value)
            case _:
                flat.append(outputs[result.position])
    return tree_unflatten(flat, call.results_spec)


def run_eagerly(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """What a call returns in eager PyTorch, and its leaves after it, on copies of its arguments."""
    copied_args, copied_kwargs = copy.deepcopy((args, kwargs))
    result = op(*copied_args, **copied_kwargs)
    return result, tree_leaves((copied_args, copied_kwargs))


def check_call(
    op: Any,
    *args: Any,
    allow_host: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> CapturedCall:
    """Compares a call with eager PyTorch: results, changed arguments and dtypes."""
    expected, changed = run_eagerly(op, *args, **kwargs)
    call = capture_call(op, *describe((args, kwargs)), native_operators())
    leaves = tree_flatten((args, kwargs))[0]
    assert call.accepts(tree_leaves(describe((args, kwargs))))
    actual = run_call(call, leaves, allow_host=allow_host)
    compare(tree_leaves(actual), tree_leaves(expected), rtol=rtol, atol=atol)
    compare(leaves, changed, rtol=rtol, atol=atol)
    return call


def check_reuse(
    call: CapturedCall,
    op: Any,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> None:
    """Runs a captured graph for another call, which it must accept, against eager PyTorch."""
    assert call.accepts(tree_leaves(describe((args, kwargs))))
    expected, changed = run_eagerly(op, *args, **kwargs)
    leaves = tree_leaves((args, kwargs))
    actual = run_call(call, leaves)
    compare(tree_leaves(actual), tree_leaves(expected), rtol=rtol, atol=atol)
    compare(leaves, changed, rtol=rtol, atol=atol)
