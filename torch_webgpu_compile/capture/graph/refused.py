"""What PyTorch refuses in Dynamo's graph: Dynamo makes its calls on tensors without contents."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...torch_private import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    _enter_autocast,
    _exit_autocast,
    _is_any_autocast_enabled,
    tree_leaves,
    tree_map_only,
)
from ..fx_graphs import memory_like
from ..refusals import refusal

_MODULES = ("torch.nn.functional", "torch.functional", "torch._jit_internal", "_operator")
_NAMESPACES = tuple(f"torch._C._{name}" for name in ("nn", "fft", "linalg", "special"))
# Methods that are for one device.
_PLACING = frozenset({"cpu", "cuda", "to", "record_stream"})


def check_calls(module: GraphModule) -> None:
    """Raises what PyTorch raises about a call in a graph, or in a part of it.

    Of a graph with autocast in it, parts are not looked at: they do not say whether it is on.
    """
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes]
    if _is_any_autocast_enabled() or any(node.target is _enter_autocast for node in nodes):
        _check_under_autocast(module)
        return
    for function, args, kwargs in filter(None, map(_call, nodes)):
        error = refusal(function, args, kwargs, sizes_fit=True)
        if error is not None:
            raise error


def _check_under_autocast(module: GraphModule) -> None:
    """Has the operators asked about that each call becomes, whose arguments autocast converts."""
    entered: list[Any] = []
    try:
        for node in module.graph.nodes:
            if node.target is _enter_autocast:
                entered.append(torch.amp.autocast(*node.args))
                entered[-1].__enter__()
            elif node.target is _exit_autocast:
                entered.pop().__exit__(None, None, None)
            elif (call := _call(node)) is not None:
                _check_operators(*call)
    finally:
        while entered:
            entered.pop().__exit__(None, None, None)


def _check_operators(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    fake = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    if not fake:
        return
    mode = fake[0].fake_mode
    asks = _Asks()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        stack.enter_context(suppress(Exception))  # whoever traces the graph raises it, too
        stack.enter_context(torch.no_grad())
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(mode)
        made = tree_map_only(Tensor, memory_like, (args, kwargs))  # the call may change them
        stack.enter_context(asks)
        function(*made[0], **made[1])
    if asks.error is not None:
        raise asks.error


class _Asks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks about every operator before it runs; ``error`` is what it is refused for."""

    error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.error = refusal(func, args, kwargs or {})
        if self.error is not None:
            raise self.error
        return func(*args, **(kwargs or {}))


def _call(node: Node) -> tuple[Callable[..., Any], Any, Any] | None:
    """The function, arguments and keywords of a node that calls one with tensors."""
    function = _function(node)
    known = [given.meta.get("example_value") for given in node.all_input_nodes]
    if function is None or not any(isinstance(value, Tensor) for value in known):
        return None
    by_node = dict(zip(node.all_input_nodes, known, strict=True))
    args, kwargs = map_arg((node.args, node.kwargs), by_node.__getitem__)
    return function, args, kwargs


def _function(node: Node) -> Callable[..., Any] | None:
    """What a node calls, if that is a function of PyTorch's own without other effects."""
    target: Any = node.target
    if node.op == "call_method":
        method = getattr(Tensor, target, None)
        return None if target in _PLACING else method
    if node.op != "call_function":
        return None
    if isinstance(target, OpOverload):
        return target if target.namespace == "aten" else None
    place, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    is_torchs = isinstance(target, BuiltinFunctionType) and getattr(torch, name, None) is target
    if is_torchs or place in _MODULES or str(place).startswith(_NAMESPACES):
        return target  # type: ignore[no-any-return]
    return None
