"""Functions of single numbers as lists of ATen calls, in which operators take functions.

Operators of PyTorch take no functions, so kernels that apply one of a user's to each element get it
as text: `score_functions` for attention, `scans` for loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch.fx import Node

from ..torch_private import OpOverload, core_aten_decompositions
from .names import overload_of

aten = torch.ops.aten

Source = Literal["score", "gradient", "carry", "operand", "step"]
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
    """An argument of a step: one that is given, an operand, or an earlier step, by number."""

    source: Source
    number: int = 0


Operand = Reference | float | int | bool | None


@dataclass(frozen=True, slots=True)
class Step:
    """One elementwise ATen call, or a conversion.

    Attributes:
        op: the overload's name without its namespace: ``tanh.default``.
        dtype: of the result, by its name in torch.
        keywords: numbers, strings and None.
    """

    op: str
    arguments: tuple[Operand, ...]
    dtype: str
    keywords: tuple[tuple[str, Any], ...] = ()

    @property
    def overload(self) -> OpOverload:
        """The overload."""
        return overload_of(self.op)

    @property
    def converts(self) -> bool:
        """Whether it only converts its argument to ``dtype``."""
        return self.op == "_to_copy.default"

    def of(self, value: Callable[[Operand], Any]) -> Any:
        """The result for tensors that broadcast, which ``value`` gives."""
        arguments = [value(argument) for argument in self.arguments]
        if self.converts:
            return arguments[0].to(getattr(torch, self.dtype))
        overload = self.overload
        call: Any = torch.where if overload is aten.where.self else overload  # takes numbers
        return call(*arguments, **dict(self.keywords))


def run_steps(steps: Sequence[Step], given: Callable[[Reference], Any]) -> Callable[[Operand], Any]:
    """Runs the steps of a function on tensors that broadcast; gives the values of arguments.

    ``given``: the values of references other than to steps.
    """
    results: list[Any] = []

    def value(argument: Operand) -> Any:
        if isinstance(argument, Reference):
            return results[argument.number] if argument.source == "step" else given(argument)
        return argument

    for step in steps:
        results.append(step.of(value))
    return value


def written(step: Step) -> list[Any]:
    """A step as JSON has it."""
    return [step.op, step.dtype, dict(step.keywords), *map(written_argument, step.arguments)]


def read(entry: Sequence[Any]) -> Step:
    """Reads a step as `written` wrote it."""
    op, dtype, keywords, *arguments = entry
    return Step(op, tuple(map(read_argument, arguments)), dtype, tuple(keywords.items()))


def written_argument(argument: Operand) -> Any:
    """An argument as JSON has it."""
    if isinstance(argument, Reference):
        return [argument.source, argument.number]
    return argument


def read_argument(argument: Any) -> Operand:
    """Reads an argument as `written_argument` wrote it."""
    return Reference(*argument) if isinstance(argument, list) else argument


@cache
def core_decompositions() -> Mapping[OpOverload, Any]:
    """The decompositions after which nearly every operator has a lowering."""
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


def step_of(
    node: Node, arguments: tuple[Operand, ...], keywords: tuple[tuple[str, Any], ...] = ()
) -> Step:
    """The step of a call, whose result is in the node's metadata."""
    op = str(node.target).removeprefix("aten.")
    return Step(op, arguments, name_of(node.meta["val"].dtype), keywords)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in torch."""
    return str(dtype).removeprefix("torch.")
