"""What PyTorch refuses in Dynamo's graph: Dynamo makes its calls on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..refusals import refusal

_MODULES = ("torch.nn.functional", "torch.functional", "torch._jit_internal", "_operator")
_NAMESPACES = tuple(f"torch._C._{name}" for name in ("nn", "fft", "linalg", "special"))
# Methods that are for one device.
_PLACING = frozenset({"cpu", "cuda", "to", "record_stream"})


def check_calls(module: GraphModule) -> None:
    """Raises what PyTorch raises about a call in a graph, or in a part of it.

    Calls under autocast are not looked at: it converts their arguments.
    """
    if torch._C._is_any_autocast_enabled():
        return
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    if any(node.target is torch.amp.autocast_mode._enter_autocast for node in nodes):
        return
    for node in nodes:
        function = _function(node)
        known = [given.meta.get("example_value") for given in node.all_input_nodes]
        if function is None or not any(isinstance(value, Tensor) for value in known):
            continue
        by_node = dict(zip(node.all_input_nodes, known, strict=True))
        args, kwargs = map_arg((node.args, node.kwargs), by_node.__getitem__)
        error = refusal(function, args, kwargs, sizes_fit=True)
        if error is not None:
            raise error


def _function(node: Node) -> Callable[..., Any] | None:
    """What a node calls, if that is a function of PyTorch's own without other effects."""
    target: Any = node.target
    if node.op == "call_method":
        method = getattr(Tensor, target, None)
        return None if target in _PLACING else method
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        return target if target.namespace == "aten" else None
    place, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    is_torchs = isinstance(target, BuiltinFunctionType) and getattr(torch, name, None) is target
    if is_torchs or place in _MODULES or str(place).startswith(_NAMESPACES):
        return target  # type: ignore[no-any-return]
    return None
