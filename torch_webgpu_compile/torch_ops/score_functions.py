"""`ScoreFunction`: what attention makes of each score, as an argument of an operator.

Operators take no functions, so it is a list of ATen calls on single numbers, written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

Source = Literal["score", "gradient", "operand", "step"]
_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)
_FILLED: dict[Any, float] = {
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), 1.0),
}
# Where an operator has the number that it fills its result with.
_VALUES: dict[Any, int] = {
    aten.scalar_tensor.default: 0,
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
}


class NotElementwise(Exception):
    """A function is more than elementwise operators of numbers."""


@dataclass(frozen=True, slots=True)
class Reference:
    """An argument of a step: the score, the gradient, or an operand or earlier step by number."""

    source: Source
    number: int = 0


Argument = Reference | float | int | bool | None


@dataclass(frozen=True, slots=True)
class Step:
    """One elementwise ATen call.

    Attributes:
        op: the overload's name without its namespace: ``tanh.default``.
        dtype: of the result, by its name in torch.
    """

    op: str
    arguments: tuple[Argument, ...]
    dtype: str

    @property
    def overload(self) -> OpOverload:
        """The overload."""
        name, _, overload = self.op.rpartition(".")
        found: OpOverload = getattr(getattr(aten, name), overload)
        return found


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """A function of one float32 score and of operands; or its gradient, of a gradient beside them.

    Attributes:
        steps: at least one; the last gives the result, a float32.
        operands: their dtypes, by their names in torch.
    """

    steps: tuple[Step, ...]
    operands: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The function as a string; see `parsed`."""
        steps = [[step.op, step.dtype, *map(_written, step.arguments)] for step in self.steps]
        return json.dumps([self.operands, *steps])

    def of(self, given: Mapping[str, Tensor], operands: Sequence[Tensor]) -> Tensor:
        """The result for tensors that broadcast; ``given``: score, and gradient where it is one."""
        results: list[Tensor] = []

        def value(argument: Argument) -> Any:
            match argument:
                case Reference("step", number):
                    return results[number]
                case Reference("operand", number):
                    return operands[number]
                case Reference(source, _):
                    return given[source]
            return argument

        for step in self.steps:
            overload = step.overload
            call: Any = torch.where if overload is aten.where.self else overload  # takes numbers
            results.append(call(*map(value, step.arguments)))
        return results[-1]

    def gradient(self) -> ScoreFunction:
        """The gradient by the score, of a ``gradient`` by the result.

        Raises NotElementwise: autograd makes something else of it.
        """
        return _gradient(self.text)


def parsed(text: str) -> ScoreFunction:
    """The function that `ScoreFunction.text` wrote."""
    operands, *steps = json.loads(text)
    return ScoreFunction(
        tuple(Step(op, tuple(map(_read, rest)), dtype) for op, dtype, *rest in steps),
        tuple(operands),
    )


def _written(argument: Argument) -> Any:
    if isinstance(argument, Reference):
        return [argument.source, argument.number]
    return argument


def _read(argument: Any) -> Argument:
    return Reference(*argument) if isinstance(argument, list) else argument


@cache
def _gradient(text: str) -> ScoreFunction:
    function = parsed(text)

    def pulled(gradient: Tensor, score: Tensor, *operands: Tensor) -> Tensor:
        result = function.of({"score": score}, operands)
        (found,) = torch.autograd.grad(result, score, gradient, materialize_grads=True)
        return found

    def traced() -> Graph:
        numbers = [torch.ones(()), torch.ones((), requires_grad=True)]
        operands = [torch.ones((), dtype=getattr(torch, name)) for name in function.operands]
        return make_fx(pulled, dict(core_decompositions()))(*numbers, *operands).graph

    # Callers are in an operator's kernel, or in a trace; a new thread is outside of both.
    with ThreadPoolExecutor(1) as thread:
        graph = thread.submit(traced).result()
    return ScoreFunction(_steps(graph), function.operands)


@cache
def core_decompositions() -> Mapping[OpOverload, Any]:
    """Those after which nearly every operator has a lowering."""
    return dict(core_aten_decompositions())


def is_elementwise(op: Any) -> bool:
    """Whether an overload computes each element of its result from those at the same place."""
    return isinstance(op, OpOverload) and torch.Tag.pointwise in op.tags


def constant_of(node: Node) -> float | int | bool | None:
    """The number that fills the result of a node; None if there is none or it is not known."""
    position = _VALUES.get(node.target)
    if position is None:
        return _FILLED.get(node.target)
    value = node.args[position]
    return value if isinstance(value, (bool, int, float)) else None


def step_of(node: Node, arguments: tuple[Argument, ...]) -> Step:
    """The step of a call, whose result is in the node's metadata."""
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return Step(str(node.target).removeprefix("aten."), arguments, dtype)


def _steps(graph: Graph) -> tuple[Step, ...]:
    """The steps of a graph of elementwise calls, whose placeholders are gradient, score, operands.

    Raises NotElementwise: it has other nodes.
    """
    steps: list[Step] = []
    gradient, score, *operands = graph.find_nodes(op="placeholder")
    known: dict[Any, Argument] = {gradient: Reference("gradient"), score: Reference("score")}
    known |= {node: Reference("operand", k) for k, node in enumerate(operands)}
    for node in graph.find_nodes(op="get_attr"):
        raise NotElementwise(str(node.target))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        number = constant_of(node)
        if node.target in _SAME:
            known[node] = known[node.args[0]]
        elif number is not None:
            known[node] = number
        elif is_elementwise(node.target) and not node.kwargs:
            arguments = tuple(known[a] if isinstance(a, Node) else a for a in node.args)
            steps.append(step_of(node, arguments))
            known[node] = Reference("step", len(steps) - 1)
        else:
            raise NotElementwise(str(node.target))
    (output,) = graph.find_nodes(op="output")
    result = known[output.args[0]]
    if isinstance(result, Reference) and result != Reference("step", len(steps) - 1):
        steps.append(Step("mul.Tensor", (result, 1.0), "float32"))
    elif not isinstance(result, Reference):
        steps.append(Step("mul.Tensor", (Reference("gradient"), result), "float32"))
    return tuple(steps)
