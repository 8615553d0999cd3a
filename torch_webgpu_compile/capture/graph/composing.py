"""`Composer`: a graph that was divided becomes a composed plan, part by part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ...captured import CapturedGraph, Phase
from ...errors import UnsupportedOp
from ...fallbacks import OnFallback
from ...plan.model import HostStep, Plan
from ...torch_ops.foreign import NO_IMPLEMENTATION
from ..control_flow.calls import calls_between
from ..control_flow.compose import Planned, compose
from ..control_flow.parts import Part
from ..tracing import is_random
from . import passes
from .passes import Draft, State

PlanMaker = Callable[[CapturedGraph, Phase], Plan]


class Composer:
    """Makes composed plans.

    Args:
        state: for passes.
        plan: makes a plan of a part.
        on_host: told of operators that run on the host between plans; raises where none may.
    """

    def __init__(self, state: State, plan: PlanMaker, on_host: OnFallback) -> None:
        self._state, self._make, self._on_host = state, plan, on_host

    def compose(self, draft: Draft) -> Plan:
        """The plan of a graph that was divided, whose parts are compiled one by one."""
        divided = draft.divided
        assert divided is not None
        for step in divided.plan.steps:
            if isinstance(step, HostStep) and not step.on_device:
                self._on_host(step.target, "any dtype", step.source, NO_IMPLEMENTATION)
        planned = []
        for k, part in enumerate(divided.parts):
            inner = _part(draft, f"{draft.captured.name}_{k}", part)
            planned.append(self._function(inner) if part.is_function else self._plan(inner))
        return compose(divided, planned)

    def _function(self, draft: Draft) -> Planned:
        """The plan of a function that a loop or a branch calls."""
        draft = with_calls(passes.run(draft, self._state, passes.TRACED))
        graph = draft.module.graph
        output = graph.output_node()
        if isinstance(output.args[0], Node):  # a condition
            output.args = (output.args,)
        returned: Any = output.args[0]
        ends = [*graph.find_nodes(op="placeholder"), *returned]
        values = [end.meta.get("val") if isinstance(end, Node) else end for end in ends]
        is_plain = all(isinstance(v, (torch.Tensor, torch.SymInt, int, type(None))) for v in values)
        if not draft.calls and is_plain and not any(map(is_random, graph.nodes)):
            return self._plan(draft)
        draft = passes.run(draft, self._state, passes.SEVERAL)
        return Planned(self.compose(draft), Phase("inference"))

    def _plan(self, draft: Draft) -> Planned:
        """The plan of kernels of a part."""
        draft = passes.run(draft, self._state, passes.RETURNED, passes.WHOLE, passes.CALL)
        if draft.numbers:
            raise UnsupportedOp("symbolic size", "no argument of a part gives it", "")
        return Planned(self._make(draft.captured, draft.phase), draft.phase)


def _part(draft: Draft, name: str, part: Part) -> Draft:
    """A part or a function of a graph that was divided."""
    captured = replace(
        draft.captured,
        name=name,
        module=part.module,
        static_inputs=part.static,
        numbers=part.floats,
    )
    return Draft(captured, Phase("inference"))


def with_calls(draft: Draft) -> Draft:
    """With what divides it."""
    return replace(draft, calls=calls_between(draft.module.graph))
