"""Whether a stored plan is one of the graph that asks for it, as far as both say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..errors import VerificationError
from ..ir.buffers import Buffer
from ..ir.graph import LoopGraph, is_effect
from ..ir.nodes import HostCall
from ..plan.model import HostStep, Plan, PlanBuffer, PlanInput
from ..symbolic.nested import HostBuffer, map_leaves


def verify_match(plan: Plan, graph: LoopGraph) -> None:
    """Raises VerificationError when inputs, results, constants or host operators are not the same.

    A plan may only call the host's operators that its graph has, with the same arguments: nothing
    that a file names is run because it is named there.
    """

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise VerificationError(f"plan {plan.name}: {what} are not those of the graph")

    inputs = tuple(PlanInput(entry.buffer, entry.size) for entry in graph.inputs)
    require(_text(plan.inputs) == _text(inputs), "inputs")
    for entry in graph.inputs:
        if entry.buffer is not None:
            own, asked = plan.buffers[entry.buffer], graph.buffers[entry.buffer]
            require(_layout(own) == _layout(asked), f"the dtype and sizes of {entry.buffer}")
    require(len(plan.outputs) == len(graph.outputs), "results")
    for made, wanted in zip(plan.outputs, graph.outputs, strict=True):
        require(
            _text(made.size, made.constant, made.mutates, made.buffer is None)
            == _text(wanted.size, wanted.constant, wanted.mutates, wanted.buffer is None),
            "results",
        )
        if made.buffer is not None and wanted.buffer is not None:
            own, asked = plan.buffers[made.buffer], graph.buffers[wanted.buffer]
            require(own.dtype is asked.dtype, "dtypes of results")
            same = made.buffer != wanted.buffer or _layout(own) == _layout(asked)
            require(same, f"the dtype and sizes of {made.buffer}")
            require(_text(made.sizes) == _text(wanted.sizes), "sizes of results")
            # What is written in place is where the argument is, and as that is laid out.
            in_place = own.role == "input" and wanted.mutates is not None
            view, layout = (made.strides, made.offset), (own.strides, own.offset)
            require(
                _text(view) == _text(layout)
                if in_place and made.buffer != wanted.buffer
                else _text(made.buffer, *view)
                == _text(wanted.buffer, wanted.strides, wanted.offset),
                "places of results",
            )
    for part in (plan, plan.preparation):
        require(part is None or _host_calls(part) <= _host_calls_of(graph), "operators of the host")


def _text(*parts: Any) -> str:
    """Text of the parts that have to match. A plan's symbols have no ranges, a graph's do."""
    return repr(parts)


def _layout(buffer: PlanBuffer | Buffer) -> str:
    return _text(buffer.dtype, buffer.sizes, buffer.strides, buffer.offset)


def _host_calls(plan: Plan) -> Counter[Any]:
    return Counter(
        _call(step, step.outputs, plan.buffers) for step in plan.steps if isinstance(step, HostStep)
    )


def _host_calls_of(graph: LoopGraph) -> Counter[Any]:
    return Counter(
        _call(node, () if is_effect(node, graph) else node.outputs, graph.buffers)
        for node in graph.nodes
        if isinstance(node, HostCall)
    )


def _call(
    call: HostStep | HostCall,
    outputs: tuple[str, ...],
    buffers: Mapping[str, PlanBuffer] | Mapping[str, Buffer],
) -> Any:
    """A call with what its tensors are in place of their names."""

    def tensor(name: str) -> Any:
        return ("tensor", _layout(buffers[name])) if name else None

    def described(leaf: Any) -> Any:
        if isinstance(leaf, HostBuffer):
            return *tensor(leaf.buffer), leaf.strides
        return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf

    given = (call.arguments, call.keywords, call.changed)
    made = tuple(map(tensor, outputs))
    return call.target, call.on_device, made, map_leaves(described, given)
