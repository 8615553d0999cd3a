"""Functions of `flex_attention`'s users, read: what they do to scores, and which they keep.

A ``score_mod`` is a function of one score, of its position (batch, head, query, key), and of
captured tensors. Traced once, on tensors that broadcast to all scores, it is a graph of ATen calls.
If they are elementwise, or take elements of captured tensors at the position, then what does not
depend on the score is computed by these calls themselves, as a bias: lowering makes no tensor of
it. What does depend on the score is a factor, a bias, or scores that are replaced; where it is
anything else, such as ``tanh``, it is a `ScoreFunction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...torch_ops.elementwise import (
    NotElementwise,
    Operand,
    Reference,
    Step,
    constant_of,
    core_decompositions,
    is_elementwise,
    name_of,
    step_of,
)
from ...torch_ops.score_functions import ScoreFunction
from ...torch_private import FakeTensorMode, _disable_current_modes, detect_fake_mode, tree_map_only
from ..tracing import Rules, Traced, clean_dispatch, trace

aten = torch.ops.aten

Sizes = tuple[Any, Any, Any, Any]
"""Batch, heads, queries and keys."""

_UNCHANGED = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class Modified:
    """Scores that a function makes of others: ``function(factor · score) + bias``.

    Attributes:
        function: None: what it is given, with the factor.
        operands: of the function; they broadcast to all scores.
        bias: what is added, broadcastable to all scores.
        replaced: bool; where it holds, the bias alone is the score.
    """

    factor: float = 1.0
    function: ScoreFunction | None = None
    operands: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    replaced: Tensor | None = None

    def kept(self, mask: Tensor | None) -> Modified:
        """The same with scores of -inf where the mask does not hold; None keeps all."""
        if mask is None:
            return self
        bias = _chosen(mask, 0.0 if self.bias is None else self.bias, -math.inf)
        if self.function is None:  # -inf in a sum is -inf
            return replace(self, bias=bias)
        return replace(self, bias=bias, replaced=_excluded(mask, self.replaced))


def modified_scores(score_mod: Any, buffers: Sequence[Any], sizes: Sizes, like: Tensor) -> Modified:
    """What a ``score_mod`` makes of scaled scores.

    Args:
        buffers: what it captures; they are given to it behind the position.
        like: a tensor on the device of the scores, in whose trace the bias is to be computed.

    Raises:
        NotElementwise: it is more than elementwise operators.
    """
    reading = _Reading(score_mod, buffers, sizes, like, of_scores=True)
    result = reading.run()
    if not isinstance(result, _Score):
        raise NotElementwise("it gives something else than scores")
    return reading.modified(result)


def mask_of(mask_mod: Any, buffers: Sequence[Any], sizes: Sizes, like: Tensor) -> Tensor | None:
    """The mask that a ``mask_mod`` says, broadcastable to all scores; None if it keeps all of them.

    Arguments and errors are those of `modified_scores`.
    """
    reading = _Reading(mask_mod, buffers, sizes, like, of_scores=False)
    result = reading.run()
    if not isinstance(result, Tensor) or result.dtype != torch.bool:
        raise NotElementwise("it gives something else than a mask")
    return None if reading.is_true else result


_SCORE = Reference("score")


@dataclass(frozen=True)
class _Score:
    """A number that depends on the score: ``factor · base + bias``, or the bias where `replaced`.

    Attributes:
        base: the score or a step.
    """

    base: Reference = _SCORE
    factor: float = 1.0
    bias: Tensor | float | None = None
    replaced: Tensor | None = None


class _Reading:
    """Goes through the calls of a traced function."""

    def __init__(
        self, function: Any, buffers: Sequence[Any], sizes: Sizes, like: Tensor, of_scores: bool
    ) -> None:
        self._like = like
        self._positions = _positions(sizes, like.device)
        self._buffers = buffers
        self._of_scores = of_scores
        self._traced = _traced(function, buffers, sizes, like, of_scores)
        self._sizes = {_expression(n): n for n in (*buffers, *sizes) if _is_symbol(n)}
        self._values: dict[Node, Any] = {}
        self._varying: set[Node] = set()  # that depend on the position
        self._numbers: dict[Node, Any] = {}  # that are known
        self._steps: list[Step] = []
        self._operands: list[Tensor] = []

    @property
    def is_true(self) -> bool:
        """Whether the result is True everywhere."""
        return self._numbers.get(self._traced.results, False) is True

    def run(self) -> Any:
        """A tensor, or a `_Score`."""
        graph = self._traced.module.graph
        scores = [_Score()] if self._of_scores else []
        given = [*scores, *self._positions, *self._buffers]
        for node, value in zip(graph.find_nodes(op="placeholder"), given, strict=True):
            self._values[node] = value
        self._varying.update(graph.find_nodes(op="placeholder")[len(scores) : len(scores) + 4])
        for node in graph.nodes:
            if node.op == "get_attr":
                self._constant(node, getattr(self._traced.module, str(node.target)))
            elif node.op == "call_function":
                self._call(node)
        return self._values[self._traced.results]

    def modified(self, result: _Score) -> Modified:
        """A result as what attention computes."""
        factor, function = result.factor, None
        if self._steps and result.base.source == "step":
            base: Reference = result.base
            if factor != 1.0 or base.number != len(self._steps) - 1:
                self._step(Step("mul.Tensor", (base, factor), "float32"))
            names = tuple(name_of(o.dtype) for o in self._operands)
            function, factor = ScoreFunction(tuple(self._steps), names), 1.0
            function.gradient()  # raises NotElementwise
        bias = result.bias
        if isinstance(bias, (int, float)):
            bias = torch.full((1, 1, 1, 1), float(bias), device=self._like.device)
        operands = tuple(self._operands) if function is not None else ()
        return Modified(factor, function, operands, bias, result.replaced)

    def _constant(self, node: Node, value: Any) -> None:
        if not isinstance(value, Tensor) or value.dim():
            raise NotElementwise("a tensor that it makes")
        with _disable_current_modes():
            number = value.item()
        self._number(node, number, value.dtype)

    def _number(self, node: Node, number: Any, dtype: torch.dtype) -> None:
        self._numbers[node] = number
        self._values[node] = torch.full((), number, dtype=dtype, device=self._like.device)

    def _call(self, node: Node) -> None:
        number = constant_of(node)
        value = node.meta.get("val")
        if node.target in (*_UNCHANGED, aten.lift_fresh.default) and node.args[0] in self._numbers:
            number = self._numbers[node.args[0]]  # type: ignore[index]
        if number is not None and isinstance(value, Tensor):
            wanted = bool(number) if value.dtype == torch.bool else number
            self._number(node, wanted, value.dtype)
        elif any(isinstance(self._values[n], _Score) for n in node.all_input_nodes):
            self._values[node] = self._of_score(node)
        else:
            if not self._varying.isdisjoint(node.all_input_nodes):
                self._check(node)
                self._varying.add(node)
            args, kwargs = self._arguments((node.args, node.kwargs))
            self._values[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _arguments(self, tree: Any) -> Any:
        """Arguments with values in place of nodes, and the caller's own symbols."""
        found = tree_map_only(Node, self._values.__getitem__, tree)

        def known(value: Any) -> Any:
            if _is_symbol(value) and _expression(value) in self._sizes:
                return self._sizes[_expression(value)]
            raise NotElementwise("arithmetic on sizes")

        return tree_map_only((torch.SymInt, torch.SymFloat, torch.SymBool), known, found)

    def _check(self, node: Node) -> None:
        """Raises NotElementwise unless a call computes each position's number from its own ones."""
        others = [n for n in node.all_input_nodes if n not in self._varying]
        if node.target is aten.index.Tensor:
            source, indices = node.args
            assert isinstance(source, Node)
            assert isinstance(indices, (list, tuple))
            of_elements = (
                source not in self._varying
                and len(indices) == _value(source).dim()
                and all(isinstance(i, Node) for i in indices)
                and all(not _value(i).dtype.is_floating_point for i in indices)
                and not any(_value(i).dtype in (torch.bool, torch.uint8) for i in indices)
            )
            others = [n for n in others if n is not source]
        else:
            of_elements = is_elementwise(node.target) or node.target is aten._to_copy.default
        numbers = (not isinstance(_value(n), Tensor) or _value(n).dim() == 0 for n in others)
        if not of_elements or not all(numbers):
            raise NotElementwise(str(node.target))

    # ---- what depends on the score

    def _of_score(self, node: Node) -> _Score:
        arguments = [self._values[a] if isinstance(a, Node) else a for a in node.args]
        if node.target in _UNCHANGED or self._is_conversion(node):
            found = arguments[0]
            assert isinstance(found, _Score)
            return found
        linear = None if node.kwargs else self._linear(node, arguments)
        if linear is not None:
            return linear
        if node.kwargs or not is_elementwise(node.target):
            raise NotElementwise(str(node.target))
        references = tuple(map(self._reference, node.args))
        return _Score(self._step(step_of(node, references)))

    def _is_conversion(self, node: Node) -> bool:
        """Whether a call leaves a float32 as it is."""
        same = _value(node).dtype == torch.float32 == _value(node.args[0]).dtype
        return node.target is aten._to_copy.default and same

    def _linear(self, node: Node, arguments: Sequence[Any]) -> _Score | None:
        """The result of a call that is a sum, a multiple or a choice; None of others."""
        target = node.target
        if target is aten.neg.default:
            return _times(arguments[0], -1.0)
        if target is aten.where.self and not isinstance(arguments[0], _Score):
            kept, yes, no = arguments
            if not isinstance(no, _Score):
                return self._choice(yes, kept, node.args[2])
            if not isinstance(yes, _Score):
                return self._choice(no, torch.logical_not(kept), node.args[1])
        places = [k for k, value in enumerate(arguments) if isinstance(value, _Score)]
        if len(arguments) != 2 or len(places) != 1:
            return None
        (place,) = places
        score, other, by = arguments[place], arguments[1 - place], node.args[1 - place]
        if target in (aten.add.Tensor, aten.add.Scalar):
            return _plus(score, other)
        if target in (aten.sub.Tensor, aten.sub.Scalar):
            return _plus(_times(score, -1.0), other) if place else _plus(score, -other)
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return self._multiple(score, by)
        if target in (aten.div.Tensor, aten.div.Scalar) and place == 0:
            return self._multiple(score, by, divides=True)
        return None

    def _multiple(self, score: _Score, by: Any, divides: bool = False) -> _Score | None:
        """A score times a known number, or divided by it."""
        number = self._numbers.get(by) if isinstance(by, Node) else by
        if not isinstance(number, (int, float)) or (divides and not number):
            return None
        return _times(score, 1.0 / number if divides else float(number))

    def _choice(self, score: _Score, kept: Tensor, other: Any) -> _Score:
        """The score where ``kept`` holds, else another number."""
        number = self._numbers.get(other) if isinstance(other, Node) else other
        value = self._values[other] if isinstance(other, Node) else other
        bias = 0.0 if score.bias is None else score.bias
        if number == -math.inf and score.base.source == "score":
            return replace(score, bias=_chosen(kept, bias, -math.inf))
        replaced = _excluded(kept, score.replaced)
        return replace(score, bias=_chosen(kept, bias, value), replaced=replaced)

    def _step(self, step: Step) -> Reference:
        self._steps.append(step)
        return Reference("step", len(self._steps) - 1)

    def _reference(self, argument: Any) -> Operand:
        """An argument of a step."""
        if not isinstance(argument, Node):
            if argument is None or isinstance(argument, (bool, int, float)):
                return argument
            raise NotElementwise("arithmetic on sizes")
        value = self._values[argument]
        if isinstance(value, _Score):
            if value.replaced is not None:
                raise NotElementwise("it goes on with scores that it replaced")
            found = value.base
            if value.factor != 1.0:
                found = self._step(Step("mul.Tensor", (found, value.factor), "float32"))
            if value.bias is not None:
                added = self._operand(value.bias)
                found = self._step(Step("add.Tensor", (found, added), "float32"))
            return found
        number = self._numbers.get(argument)
        return self._operand(value) if number is None else number

    def _operand(self, value: Any) -> Operand:
        if isinstance(value, (bool, int, float)):
            return value
        if not isinstance(value, Tensor) or value.requires_grad:
            raise NotElementwise("scores and tensors with a gradient meet in more than a sum")
        for number, known in enumerate(self._operands):
            if known is value:
                return Reference("operand", number)
        self._operands.append(value)
        return Reference("operand", len(self._operands) - 1)


def _times(score: _Score, number: float) -> _Score:
    bias = None if score.bias is None else score.bias * number
    return replace(score, factor=score.factor * number, bias=bias)


def _plus(score: _Score, other: Tensor | float) -> _Score:
    return replace(score, bias=other if score.bias is None else score.bias + other)


def _chosen(condition: Tensor, yes: Tensor | float, no: Tensor | float) -> Tensor:
    """``torch.where`` as float32, of numbers, too."""
    return torch.where(condition, yes, no).to(torch.float32)


def _excluded(kept: Tensor, before: Tensor | None) -> Tensor:
    """What is not kept, or was not before."""
    excluded = torch.logical_not(kept)
    return excluded if before is None else torch.logical_or(excluded, before)


def _positions(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """Batch, head, query and key of each score, int64, each along its own dimension of four."""
    found = []
    for dim, size in enumerate(sizes):
        shape = [1, 1, 1, 1]
        shape[dim] = size
        found.append(torch.arange(size, device=device).view(shape))
    return found


def _traced(
    function: Any, buffers: Sequence[Any], sizes: Sizes, like: Tensor, of_scores: bool
) -> Traced:
    """A function of scores of these sizes, or of positions, as a graph."""
    mode = detect_fake_mode([like]) or FakeTensorMode()
    device = like.device
    layouts = [(b.shape, b.dtype, b.device) if isinstance(b, Tensor) else b for b in buffers]
    with clean_dispatch(symbolic=mode.shape_env is not None):
        with mode:
            inputs: list[Any] = [torch.empty(sizes, device=device)] if of_scores else []
            inputs += _positions(sizes, device)
            inputs += [
                torch.empty(b[0], dtype=b[1], device=b[2]) if isinstance(b, tuple) else b
                for b in layouts
            ]
        try:
            rules = Rules(core_decompositions(), frozenset())
            traced = trace(function, inputs, mode, rules, mutates=True)
        except Exception as error:  # of a function that takes single numbers only, or is wrong
            raise NotElementwise(str(error)) from error
    if traced.mutated or not isinstance(traced.results, Node):
        raise NotElementwise("it changes a tensor, or gives none")
    return traced


def _value(node: Any) -> Any:
    return node.meta.get("val")


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _expression(value: Any) -> Any:
    return value.node.expr
