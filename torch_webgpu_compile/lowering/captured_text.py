"""`captured_text`: all that lowering reads of a captured graph, as text: the key of its result.

And whether a plan that is stored under such a key can be that of the graph: `verify_plan_of`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch
from torch.fx import Node as FxNode

from ..captured import CapturedGraph, Phase, line_of_user, user_source
from ..errors import VerificationError
from ..plan.model import HostStep, Plan
from ..symbolic.sizes import as_expr
from ..torch_ops.dtypes import dtype_of
from ..torch_private import OpOverload, unset_fake_temporarily
from .fx_nodes import bytes_of, storage_of
from .registry import is_own

_PLAIN = (type(None), bool, int, float, complex, str, type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Unreadable(Exception):
    """Something that has no text, or of which lowering may read more than its text says."""


def captured_text(captured: CapturedGraph, phase: Phase) -> str | None:
    """Text that two graphs only have in common if lowering makes the same of both.

    That is for one version of this package and of PyTorch, one GPU and the same options. Names that
    are unique in a process are left out, those of nodes and lines of the user's are not.

    Returns:
        None for graphs with size symbols, of which lowering asks PyTorch more than can be written
        down, and with operators of the user's, which may be others under the same name.
    """
    try:
        return "\n".join(_lines(captured, phase))
    except _Unreadable:
        return None


def _lines(captured: CapturedGraph, phase: Phase) -> list[str]:
    if captured.numbers:
        raise _Unreadable
    offsets = _text(sorted(captured.offsets.items()))
    static = sorted(captured.static_inputs)
    storages: dict[int, int] = {}
    sources: dict[str, str] = {}
    lines = [f"{torch.__version__} {torch.get_default_dtype()} {phase} {static} {offsets}"]
    for node in captured.module.graph.nodes:
        value = _value_text(node.meta.get("val"), storages)
        match node.op:
            case "call_function":
                given = f"{_target(node.target)}{_text(node.args)}{_text(node.kwargs)}"
            case "get_attr":
                given = _constant(captured.module, node)
            case "placeholder" | "output":
                given = _text(node.args)
            case _:
                raise _Unreadable
        lines.append(f"{node.name} {node.op} {given} {value} # {_source(node, sources)}")
    return lines


def _target(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload) and is_own(target):
        return str(target)
    raise _Unreadable


def _constant(module: torch.fx.GraphModule, node: FxNode) -> str:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise _Unreadable
    with unset_fake_temporarily():  # a constant is a real tensor, also while compiling
        digest = sha256(bytes_of(value.detach().cpu()).tobytes()).hexdigest()
    return f"{value.dtype}{tuple(value.shape)} {digest}"


def _text(value: Any) -> str:
    """An argument of a node."""
    if isinstance(value, FxNode):
        return f"%{value.name}"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"{'(' if isinstance(value, tuple) else '['}{', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}={_text(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step))}"
    raise _Unreadable


def _value_text(value: Any, storages: dict[int, int]) -> str:
    """What is known of a node's value; ``storages`` are numbered in the order of the graph."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value_text(entry, storages) for entry in value)})"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise _Unreadable
    layout: Sequence[Any] = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in layout):
        raise _Unreadable
    storage = storages.setdefault(storage_of(value), len(storages))
    return f"{value.dtype}{layout} {value.dim()} {value.device} {storage}"


def _source(node: FxNode, sources: dict[str, str]) -> str:
    """The user's line, found once for all nodes of one trace."""
    trace = node.meta.get("stack_trace") or ""
    if trace not in sources:
        sources[trace] = line_of_user(trace)
    return sources[trace] or user_source(node)


def verify_plan_of(captured: CapturedGraph, plan: Plan) -> None:
    """Raises VerificationError for a plan with other arguments or results than a graph's.

    And for one that calls the host: `planner.match` compares its calls with those of a graph that
    was lowered, as nothing that a file names is run because it is named there.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {plan.name}: {what} are not those of the graph")

    calls = any(isinstance(step, HostStep) for part in plan.all_plans for step in part.steps)
    require(not calls, "operators of the host")
    graph = captured.module.graph
    arguments = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    require(len(plan.inputs) == len(arguments), "inputs")
    for position, (entry, value) in enumerate(zip(plan.inputs, arguments, strict=True)):
        require((entry.buffer is not None) == isinstance(value, torch.Tensor), "inputs")
        if entry.buffer is not None:
            own = plan.buffers[entry.buffer]
            layout = (*value.shape, *value.stride(), captured.offsets.get(position, 0))
            require(own.dtype is dtype_of(value.dtype), "dtypes of inputs")
            same = (*own.sizes, *own.strides, own.offset) == tuple(map(as_expr, layout))
            require(same, "sizes of inputs")
    (returned,) = graph.output_node().args
    assert isinstance(returned, (tuple, list))
    require(len(plan.outputs) >= len(returned), "results")
    for output, node in zip(plan.outputs, returned, strict=False):
        value = node.meta.get("val") if isinstance(node, FxNode) else None
        if isinstance(value, torch.Tensor) and output.buffer is not None:
            require(plan.buffers[output.buffer].dtype is dtype_of(value.dtype), "dtypes of results")
            require(output.sizes == tuple(map(as_expr, value.shape)), "sizes of results")
