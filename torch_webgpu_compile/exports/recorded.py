"""`Recorded`: a call as a graph; `difference`: whether two calls are the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..torch_private import FakeTensor, HigherOrderOperator, tree_flatten, tree_leaves
from .names import key_of
from .steps import CHECK, READ, Steps

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_READ_NUMBER = re.compile(r"\b(?:u|zuf)\d+\b")


@dataclass(frozen=True)
class Recorded:
    """A call as a graph, not functional yet.

    Attributes:
        module: placeholders are the inputs; ``get_attr`` nodes are states and constants.
        states: by the attribute's name, the real tensors.
        results: what the function returned, with FX nodes in place of tensors.
        replaced: (state's attribute, node): states that Python gave another tensor to.
        steps: the loops and branches.
    """

    module: GraphModule
    states: dict[str, Tensor]
    results: Any
    replaced: tuple[tuple[str, Node], ...]
    steps: Steps


@dataclass(frozen=True)
class Difference:
    """Where two calls differ: a node of the first one's graph, if it is not only in the results."""

    node: Node | None


def difference(one: Recorded, other: Recorded) -> Difference | None:
    """The first difference in what results and states depend on; None where there is none."""
    pair = _Pair(one, other)
    ends = [[r.results, [node for _, node in r.replaced]] for r in (one, other)]
    found = pair.compare(one.module, other.module, *ends)
    if found is None and not pair.same(*ends):
        return Difference(None)
    return found


@dataclass
class _Pair:
    one: Recorded
    other: Recorded
    nodes: dict[Node, Node] = field(default_factory=dict)
    numbers: tuple[dict[str, str], dict[str, str]] = field(default_factory=lambda: ({}, {}))

    def compare(
        self, one: GraphModule, other: GraphModule, ends: Any, other_ends: Any
    ) -> Difference | None:
        mine, theirs = _needed(one, ends), _needed(other, other_ends)
        for a, b in zip(mine, theirs, strict=False):
            self.nodes[a] = b
            is_same = a.op == b.op and (
                self._same_attribute(one, str(a.target), other, str(b.target))
                if a.op == "get_attr"
                else a.target == b.target
            )
            if not is_same or not self.same((a.args, a.kwargs), (b.args, b.kwargs)):
                return Difference(a)
        if len(mine) == len(theirs):
            return None
        return Difference(mine[len(theirs)] if len(mine) > len(theirs) else None)

    def same(self, one: Any, other: Any) -> bool:
        """Whether arguments are the same, with each other's nodes."""
        (mine, spec), (theirs, other_spec) = tree_flatten(one), tree_flatten(other)
        return spec == other_spec and all(map(self._same_leaf, mine, theirs))

    def _same_leaf(self, one: Any, other: Any) -> bool:
        if isinstance(one, Node):
            return self.nodes.get(one) is other
        if isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS):
            return self._text(0, one) == self._text(1, other)
        if isinstance(one, slice) and isinstance(other, slice):
            parts = [(s.start, s.stop, s.step) for s in (one, other)]
            return self.same(*parts)
        if type(one) is not type(other):
            return False
        if isinstance(one, (bool, int, float, complex, str)):
            return one == other or (one != one and other != other)
        return True  # dtypes, devices and the like follow from numbers and tensors

    def _text(self, which: int, number: Any) -> str:
        """Of a symbol's expression, with numbers that are read in order."""
        known = self.numbers[which]
        text = str(number.node.expr)
        return _READ_NUMBER.sub(lambda m: known.setdefault(m[0], f"read{len(known)}"), text)

    def _same_attribute(self, one: GraphModule, name: str, other: GraphModule, named: str) -> bool:
        states = self.one.states.get(name), self.other.states.get(named)
        if states[0] is not None and states[1] is not None:
            return key_of(states[0]) == key_of(states[1])
        if states != (None, None):
            return False
        values = getattr(one, name), getattr(other, named)
        if all(isinstance(value, GraphModule) for value in values):
            ends = [[n.args for n in value.graph.nodes if n.op == "output"] for value in values]
            return self.compare(*values, *ends) is None and self.same(*ends)
        if all(isinstance(value, Tensor) for value in values):
            return _same_tensors(*values)
        return type(values[0]) is type(values[1])


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
        return one.shape == other.shape and one.dtype == other.dtype
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = (one == other) | ((one != one) & (other != other))
    return bool(same.all())


def _needed(module: GraphModule, ends: Any) -> list[Node]:
    """The nodes that ``ends`` need, and those that change something, in order."""
    nodes = list(module.graph.nodes)
    needed: set[Node] = {leaf for leaf in tree_leaves(ends) if isinstance(leaf, Node)}
    for node in reversed(nodes):
        if node.op == "placeholder" or _has_effects(node) or node in needed:
            needed |= {node, *node.all_input_nodes}
    return [node for node in nodes if node in needed and node.op != "output"]


def _has_effects(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    is_step = node.target in (READ, CHECK) or isinstance(node.target, HigherOrderOperator)
    return is_step or (schema is not None and schema.is_mutable)
