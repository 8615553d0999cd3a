"""The step of a composed plan that each higher-order operator becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...plan.model import Branch, Loop, Run, Step
from . import turns
from .turns import Turns

aten = torch.ops.aten
higher_order = torch.ops.higher_order


class Around(turns.Around, Protocol):
    """The graph that has the operator."""

    def function(self, node: Any) -> int:
        """The number of the plan of a function among its arguments."""

    def part_of(self, module: GraphModule) -> int:
        """The number of a function's plan."""

    def values(self, values: Sequence[Any]) -> tuple[str, ...]:
        """The names of several tensors and numbers."""

    def results(self, node: Node) -> tuple[str, ...]:
        """Names for its results."""


def _cond(
    to: Around, node: Node, predicate: Any, then: Any, otherwise: Any, operands: Any = ()
) -> Step:
    value = predicate.meta.get("val") if isinstance(predicate, Node) else predicate
    if isinstance(value, Tensor) and value.dtype is not torch.bool:
        predicate = to.emit(aten.ne.Scalar, predicate, 0)
    return _switch(to, node, predicate, (otherwise, then), operands)


def _switch(to: Around, node: Node, index: Any, branches: Any, operands: Any = ()) -> Step:
    chosen, *given = to.values([index, *operands])
    plans = tuple(map(to.function, branches))
    return Branch(chosen, plans, tuple(given), to.results(node))


def _while_loop(
    to: Around, node: Node, condition: Any, body: Any, carried: Any, others: Any = (), *_: Any
) -> Step:
    given = to.values(carried), to.values(others)
    return Loop(to.function(body), to.function(condition), None, *given, to.results(node))


def _invoke(to: Around, node: Node, function: Any, _: str, *operands: Any) -> Step:
    return Run(to.function(function), to.values(operands), to.results(node))


def _with_turns(build: Callable[..., Turns]) -> Callable[..., Step]:
    """The step of a loop whose turns read or write rows of tensors."""

    def step(to: Around, node: Node, *args: Any) -> Step:
        loop, names = build(to, node, *args), to.results(node)
        asked = loop.condition
        return Loop(
            to.part_of(loop.body),
            None if asked is None else to.part_of(asked),
            None if loop.count is None else to.values([loop.count])[0],
            to.values(loop.carried),
            to.values(loop.others),
            ("",) * (len(loop.carried) - len(names)) + names,
            loop.stacked,
        )

    return step


def _flex_gemm(to: Around, node: Node, _: Any, function: Any, operands: Any, *__: Any) -> Step:
    return Run(to.function(function), to.values(operands), to.results(node))


def _known(**builders: Callable[..., Step]) -> dict[Any, Callable[..., Step]]:
    """Operators that not every supported PyTorch has."""
    found = {getattr(higher_order, name, None): build for name, build in builders.items()}
    return {target: build for target, build in found.items() if target is not None}


STEPS: dict[Any, Callable[..., Step]] = {
    higher_order.cond: _cond,
    higher_order.while_loop: _while_loop,
    higher_order.invoke_subgraph: _invoke,
    **_known(
        switch=_switch,
        flex_gemm=_flex_gemm,
        scan=_with_turns(turns.scan),
        map_impl=_with_turns(turns.map_rows),
        associative_scan=_with_turns(turns.associative_scan),
        while_loop_stack_output=_with_turns(turns.while_loop_stacked),
    ),
}
"""By the operator, what makes its step: of the division, the node, and its arguments."""
