"""`ScoreFunction`: a function of attention's scores, as an argument of an operator.

Operators take no functions, so it is a list of ATen calls on single numbers, written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..torch_private import make_fx
from .elementwise import (
    NotElementwise,
    Operand,
    Reference,
    Step,
    constant_of,
    core_decompositions,
    is_elementwise,
    read,
    run_steps,
    step_of,
    written,
)

aten = torch.ops.aten

_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)


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
        return json.dumps([self.operands, *map(written, self.steps)])

    def of(self, given: Mapping[str, Tensor], operands: Sequence[Tensor]) -> Tensor:
        """The result for tensors that broadcast; ``given``: score, and gradient where it is one."""

        def value(found: Reference) -> Tensor:
            return operands[found.number] if found.source == "operand" else given[found.source]

        result: Tensor = run_steps(self.steps, value)(Reference("step", len(self.steps) - 1))
        return result

    def gradient(self) -> ScoreFunction:
        """The gradient by the score, of a ``gradient`` by the result.

        Raises NotElementwise: autograd makes something else of it.
        """
        return _gradient(self.text)


def parsed(text: str) -> ScoreFunction:
    """The function that `ScoreFunction.text` wrote."""
    operands, *steps = json.loads(text)
    return ScoreFunction(tuple(map(read, steps)), tuple(operands))


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


def _steps(graph: Graph) -> tuple[Step, ...]:
    """The steps of a graph of elementwise calls, whose placeholders are gradient, score, operands.

    Raises NotElementwise: it has other nodes.
    """
    steps: list[Step] = []
    gradient, score, *operands = graph.find_nodes(op="placeholder")
    known: dict[Any, Operand] = {gradient: Reference("gradient"), score: Reference("score")}
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
