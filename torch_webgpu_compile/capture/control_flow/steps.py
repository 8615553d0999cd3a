"""The step of a composed plan that each higher-order operator becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...plan.model import Branch, Loop, Run, Step
from . import turns
from .turns import Around

aten = torch.ops.aten
higher_order = torch.ops.higher_order


def _plan(to: Around, function: Any) -> int:
    """The number of the plan of a function among the arguments."""
    return to.part_of(to.module_of(function))


def _cond(
    to: Around, node: Node, predicate: Any, then: Any, otherwise: Any, operands: Any = ()
) -> Step:
    value = predicate.meta.get("val") if isinstance(predicate, Node) else predicate
    if isinstance(value, Tensor) and value.dtype is not torch.bool:
        predicate = to.emit(aten.ne.Scalar, predicate, 0)
    return _switch(to, node, predicate, (otherwise, then), operands)


def _switch(to: Around, node: Node, index: Any, branches: Any, operands: Any = ()) -> Step:
    chosen, *given = to.values([index, *operands])
    plans = tuple(_plan(to, branch) for branch in branches)
    return Branch(chosen, plans, tuple(given), to.results(node))


def _while_loop(
    to: Around, node: Node, condition: Any, body: Any, carried: Any, others: Any = (), *_: Any
) -> Step:
    given = to.values(carried), to.values(others)
    return Loop(_plan(to, body), _plan(to, condition), None, *given, to.results(node))


def _invoke(to: Around, node: Node, function: Any, _: str, *operands: Any) -> Step:
    return Run(_plan(to, function), to.values(operands), to.results(node))


def _flex_gemm(to: Around, node: Node, _: Any, function: Any, operands: Any, *__: Any) -> Step:
    return Run(_plan(to, function), to.values(operands), to.results(node))


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
        scan=turns.scan,
        map_impl=turns.map_rows,
        associative_scan=turns.associative_scan,
        while_loop_stack_output=turns.while_loop_stacked,
    ),
}
"""By the operator, what makes its step: of the division, the node, and its arguments."""
