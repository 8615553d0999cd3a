"""`dynamo_text`: all that decides what becomes of a graph of Dynamo's, as text for keys.

What AOTAutograd and the passes after it do follows from the graph, from what is known of its
arguments, and from PyTorch's switches of what operators mean. Switches of how PyTorch computes, as
``torch.backends``, lead to other graphs of the same meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from ...node_text import Unreadable, argument_text, source_text, value_text
from ...torch_private import OpOverload, is_traceable_wrapper_subclass

_NAMESPACES = ("aten", "prims")
_MODULES = ("torch", "torch._C._nn", "torch._C._fft", "torch._C._linalg", "torch._C._special")
"""Where PyTorch's functions in C++ are, which may not say so."""
_LIBRARIES = ("torch", "_operator", "math", "builtins")


def dynamo_text(module: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Text that two graphs only have in common if the same becomes of both.

    That is for one version of this package, one GPU and the same options. Arguments are called by
    their positions, as nothing is named after them: Dynamo names one after the way to it, which has
    the name of an adapter's weights in it.

    Args:
        inputs: fake tensors, in the order of the graph's arguments.

    Returns:
        None for graphs with size symbols, constants, graphs inside of them, tensor subclasses, or
        anything but PyTorch's operators and functions.
    """
    try:
        return "\n".join(_lines(module, inputs))
    except Unreadable:
        return None


def _lines(module: GraphModule, inputs: Sequence[Any]) -> Iterable[str]:
    storages: dict[int, int] = {}
    sources: dict[str, str] = {}
    given = iter(inputs)
    names: dict[str, str] = {}  # no node's name begins so
    yield _switches({"cpu", *(x.device.type for x in inputs if isinstance(x, torch.Tensor))})
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                held = _argument(node, next(given), storages)
                names[node.name] = f"#{len(names)}"
            case "call_function":
                held = f"{_function(node.target)}{argument_text([node.args, node.kwargs], names)}"
            case "call_method":
                _require_plain(node.args[0])
                held = f".{node.target}{argument_text([node.args, node.kwargs], names)}"
            case "output":
                held = argument_text(node.args, names)
            case _:
                raise Unreadable
        annotated = node.meta.get("custom") or ""  # as with a budget of memory for gradients
        name = names.get(node.name, node.name)
        yield f"{name} {node.op} {held} {annotated} # {source_text(node, sources)}"


def _switches(devices: Iterable[str]) -> str:
    autocast = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in sorted(devices)
        if torch.is_autocast_enabled(device)
    ]
    default = torch.get_default_dtype()
    return f"{torch.__version__} {default} {torch.is_grad_enabled()} {autocast}"


def _argument(node: FxNode, value: Any, storages: dict[int, int]) -> str:
    if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
        raise Unreadable
    if value.is_conj() or value.is_neg():
        raise Unreadable
    # Where Dynamo keeps what AOTAutograd tells parameters and buffers by.
    kept = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    known = value.requires_grad, value.is_inference(), isinstance(value, torch.nn.Parameter), kept
    return f"{value_text(value, storages)} {known}"


def _function(target: Callable[..., Any]) -> str:
    """The name under which the function is found again, which it has to be."""
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES:
        return str(target)
    if isinstance(target, (FunctionType, BuiltinFunctionType)):
        name = target.__name__
        for place in dict.fromkeys((target.__module__, *_MODULES)):
            is_known = place is not None and place.partition(".")[0] in _LIBRARIES
            if is_known and getattr(sys.modules.get(place), name, None) is target:
                return f"{place}.{name}"
    raise Unreadable


def _require_plain(value: Any) -> None:
    """Methods are those of tensors, and not of a subclass."""
    example = value.meta.get("example_value") if isinstance(value, FxNode) else None
    if not isinstance(example, torch.Tensor) or is_traceable_wrapper_subclass(example):
        raise Unreadable
