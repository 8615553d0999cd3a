"""Graphs that PyTorch runs as they are.

Those with tensors that no buffer of a GPU can hold: sparse tensors (the gradient of
``nn.Embedding(sparse=True)``) and dtypes without a row in the dtype table (``torch.uint64``). A
graph that is divided into forward and backward is looked at before. And those with an operator that
can be neither a kernel nor a call on the host: ``as_strided`` of a view, a result whose size is a
rounded float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ...counters import counters
from ...dtypes import DTYPES
from ...errors import ShaderError, UnsupportedOp, VerificationError, WebGPUCompileError
from ...node_text import user_source
from ...torch_private import tree_leaves
from ..fx_graphs import values_of

_DTYPES = frozenset(
    getattr(torch, name)
    for name in ("complex32", "complex64", "complex128", *(dtype.name for dtype in DTYPES))
    if hasattr(torch, name)
)


@dataclass(frozen=True)
class Reason:
    """The operator because of which a graph is not compiled.

    Attributes:
        op, dtype, source, cause: what `fallbacks.on_fallback` is told.
        on_cpu: whether the graph works on CPU tensors.
    """

    op: str
    dtype: str
    source: str
    cause: str
    on_cpu: bool


def reason_against(graph: GraphModule) -> Reason | None:
    """Why a captured graph, with fake tensors on its nodes, is not to be compiled."""
    for node in graph.graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            what = _unstorable(value)
            if what is not None:
                return Reason(
                    "an argument" if node.op == "placeholder" else str(node.target),
                    str(value.dtype).removeprefix("torch."),
                    user_source(node),
                    f"{what} tensors cannot be stored on the GPU",
                    value.device.type == "cpu",
                )
    return None


def reason_of(error: Exception, graph: GraphModule) -> Reason:
    """What was raised when a captured graph was compiled.

    An error that names no operator is a fault of the compiler, or PyTorch's refusal of an argument,
    which it repeats when it runs the graph.
    """
    tensors = [value for value in values_of(graph.graph) if isinstance(value, torch.Tensor)]
    op, source, cause = "a graph", "", f"{type(error).__name__}: {error}; please report this"
    if isinstance(error, UnsupportedOp):
        op, source, cause = error.op, error.source, error.cause
    return Reason(
        op,
        "",
        source,
        f"has no WebGPU kernel ({cause}) and leaves its graph to PyTorch",
        all(tensor.device.type == "cpu" for tensor in tensors),
    )


def leaves_to_pytorch(error: Exception) -> bool:
    """Whether a graph is PyTorch's to run because of what was raised when it was compiled.

    Not because of what the user has to know of: options, their WGSL, the state of the GPU.
    """
    ours = (UnsupportedOp, VerificationError, ShaderError)
    return isinstance(error, ours) or not isinstance(error, WebGPUCompileError)


def _unstorable(value: Any) -> torch.dtype | torch.layout | None:
    """The layout or dtype because of which a tensor cannot be stored; None if it can."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided:
        return value.layout
    return None if value.dtype in _DTYPES else value.dtype


class Uncompiled:
    """A graph run by PyTorch, as a function of a list of arguments, which it empties.

    Calls count as fallbacks of ``reason.op`` where they run on the CPU.

    Args:
        graph: with real tensors as its constants.
    """

    def __init__(self, graph: GraphModule, reason: Reason) -> None:
        self._boxed_call = True  # AOTAutograd's protocol; it copies what instances have
        self._graph = graph
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Stored without what tracing noted on the graph, fake tensors among it."""
        graph = Graph()
        graph.output(graph.graph_copy(self._graph.graph, {}))
        for node in graph.nodes:
            node.meta = {}
        return Uncompiled, (GraphModule(self._graph, graph), self._reason)

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        given = tuple(arguments)
        arguments.clear()
        results: Sequence[Any] = self._graph(*given)
        if self._reason.on_cpu:  # the device counts for itself
            counters.add_fallback(self._reason.op)
        return results
