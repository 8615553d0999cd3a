"""Compiles functions for an adapter that is not there: the backend's passes on a `Target`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torch_webgpu_compile.capture.graph import aot
from torch_webgpu_compile.captured import Phase
from torch_webgpu_compile.compiler import Compilation, compile_graph, native_operators
from torch_webgpu_compile.options import CompileOptions
from torch_webgpu_compile.target import Target

TARGET = Target()
OPTIONS = CompileOptions(fallback="error")


def compile_function(
    function: Callable[..., Any],
    *arguments: Any,
    dynamic: bool | None = None,
    target: Target = TARGET,
    options: CompileOptions = OPTIONS,
) -> Compilation:
    """The inference graph that Dynamo gives, after every pass; nothing is run on a GPU."""
    states: list[Compilation] = []
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        shown = function(*fake)
    leaves = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        if isinstance(x, torch.Tensor)
        else x
        for x in pytree.tree_leaves(shown)
    ]

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def compile_captured(captured: Any, phase: Phase) -> aot.BoxedFunction:
            states.append(compile_graph(captured, phase, target, options, use_cache=False))
            return lambda arguments: list(leaves)  # Dynamo wants results, whatever is in them

        return aot.capture(module, inputs, compile_captured, native_operators())

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*arguments)
    (state,) = states
    return state
