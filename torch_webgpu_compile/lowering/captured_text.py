"""`captured_text`: all that lowering reads of a captured graph, as text: the key of its result.

And whether a plan that is stored under such a key can be that of the graph: `verify_plan_of`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch.fx import Node as FxNode

from ..captured import CapturedGraph, Phase
from ..errors import VerificationError
from ..node_text import Unreadable, argument_text, source_text, value_text
from ..plan.model import Plan
from ..symbolic.sizes import as_expr
from ..torch_ops.dtypes import dtype_of
from ..torch_private import OpOverload, unset_fake_temporarily
from .fx_nodes import bytes_of
from .registry import is_own

_copy = torch.ops.aten.copy_.default  # to an argument, by which a graph changes it


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
    except Unreadable:
        return None


def _lines(captured: CapturedGraph, phase: Phase) -> list[str]:
    if captured.numbers:
        raise Unreadable
    offsets = argument_text(sorted(captured.offsets.items()))
    static = sorted(captured.static_inputs)
    storages: dict[int, int] = {}
    sources: dict[str, str] = {}
    lines = [f"{torch.__version__} {torch.get_default_dtype()} {phase} {static} {offsets}"]
    for node in captured.module.graph.nodes:
        value = value_text(node.meta.get("val"), storages)
        match node.op:
            case "call_function":
                given = (
                    f"{_target(node.target)}{argument_text(node.args)}{argument_text(node.kwargs)}"
                )
            case "get_attr":
                given = _constant(captured.module, node)
            case "placeholder" | "output":
                given = argument_text(node.args)
            case _:
                raise Unreadable
        lines.append(f"{node.name} {node.op} {given} {value} # {source_text(node, sources)}")
    return lines


def _target(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload) and (is_own(target) or target is _copy):
        return str(target)
    raise Unreadable


def _constant(module: torch.fx.GraphModule, node: FxNode) -> str:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise Unreadable
    with unset_fake_temporarily():  # a constant is a real tensor, also while compiling
        digest = sha256(bytes_of(value.detach().cpu()).tobytes()).hexdigest()
    return f"{value.dtype}{tuple(value.shape)} {digest}"


def verify_plan_of(captured: CapturedGraph, plan: Plan) -> None:
    """`verify_plan_between` the arguments and results of a graph."""
    graph = captured.module.graph
    arguments = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    (returned,) = graph.output_node().args
    assert isinstance(returned, (tuple, list))
    results = [node.meta.get("val") if isinstance(node, FxNode) else None for node in returned]
    verify_plan_between(arguments, captured.offsets, results, plan)


def verify_plan_between(
    arguments: Sequence[Any], offsets: Mapping[int, Any], results: Sequence[Any], plan: Plan
) -> None:
    """Raises VerificationError for a plan that does not lead from these arguments to these results.

    And for one that calls the host: `planner.match` compares its calls with those of a graph that
    was lowered, as nothing that a file names is run because it is named there.

    Args:
        arguments, results: fake tensors, or anything that is none.
        offsets: of arguments, by position: see `CapturedGraph`.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {plan.name}: {what} are not those of the graph")

    require(not plan.calls_host, "operators of the host")
    require(len(plan.inputs) == len(arguments), "inputs")
    for position, (entry, value) in enumerate(zip(plan.inputs, arguments, strict=True)):
        require((entry.buffer is not None) == isinstance(value, torch.Tensor), "inputs")
        if entry.buffer is not None:
            own = plan.buffers[entry.buffer]
            layout = (*value.shape, *value.stride(), offsets.get(position, 0))
            require(own.dtype is dtype_of(value.dtype), "dtypes of inputs")
            same = (*own.sizes, *own.strides, own.offset) == tuple(map(as_expr, layout))
            require(same, "sizes of inputs")
    require(len(plan.outputs) >= len(results), "results")
    for output, value in zip(plan.outputs, results, strict=False):
        if isinstance(value, torch.Tensor) and output.buffer is not None:
            require(plan.buffers[output.buffer].dtype is dtype_of(value.dtype), "dtypes of results")
            require(output.sizes == tuple(map(as_expr, value.shape)), "sizes of results")
