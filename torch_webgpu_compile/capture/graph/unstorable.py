"""Graphs with tensors that no buffer of a GPU can hold, which PyTorch runs as they are.

Sparse tensors (the gradient of ``nn.Embedding(sparse=True)``) and dtypes without a row in the dtype
table (``torch.uint64``). A graph that is divided into forward and backward is looked at before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ...captured import user_source
from ...counters import counters
from ...dtypes import DTYPES

_DTYPES = frozenset(
    getattr(torch, name)
    for name in ("complex32", "complex64", "complex128", *(dtype.name for dtype in DTYPES))
    if hasattr(torch, name)
)


@dataclass(frozen=True)
class Reason:
    """The first operator of a graph with a tensor that cannot be stored.

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


def _unstorable(value: Any) -> torch.dtype | torch.layout | None:
    """The layout or dtype because of which a tensor cannot be stored; None if it can."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided:
        return value.layout
    return None if value.dtype in _DTYPES else value.dtype


def uncompiled(graph: GraphModule, reason: Reason) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph run by PyTorch, as a function of a list of arguments, which it empties.

    Calls count as fallbacks of ``reason.op`` where they run on the CPU.
    """

    def call(arguments: list[Any]) -> Sequence[Any]:
        given = tuple(arguments)
        arguments.clear()
        results: Sequence[Any] = graph(*given)
        if reason.on_cpu:  # the device counts for itself
            counters.add_fallback(reason.op)
        return results

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's protocol
    return call
