"""Numbers made of symbols: what the host computes of sizes for the graphs that it calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ...errors import UnsupportedOp
from ...torch_private import PythonPrinter, tree_leaves
from ..fx_graphs import add_argument


@dataclass(frozen=True)
class Number:
    """A number made of symbols.

    Attributes:
        names: of the symbols.
        compute: the number, of their values.
    """

    names: tuple[str, ...]
    compute: Callable[..., Any] = field(repr=False)

    def of(self, symbols: Mapping[str, Any]) -> Any:
        """Its value."""
        return self.compute(*[symbols[name] for name in self.names])


def number_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """A symbolic number as a function of its symbols; a constant as it is."""
    expression = value.node.expr
    if isinstance(value, torch.SymInt) and expression.is_Integer:
        return int(expression)
    names, compute = function_of([expression])
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
    return Number(names, lambda *values: kind(compute(*values)[0]))


def function_of(
    expressions: Sequence[sympy.Expr],
) -> tuple[tuple[str, ...], Callable[..., Sequence[Any]]]:
    """The names of the symbols in expressions, and of their values the expressions' values."""
    names = sorted({str(symbol) for e in expressions for symbol in e.free_symbols})
    printer = PythonPrinter()
    text = ", ".join(printer.doprint(expression) for expression in expressions)
    compute = eval(f"lambda {', '.join(names)}: [{text}]", {"math": math, "torch": torch})
    return tuple(names), compute


def expressions_in(value: Any) -> list[tuple[sympy.Expr, Any]]:
    """The symbolic numbers in a value, with their expressions.

    The offset of a fake tensor is not among them: it says nothing of the tensor's.
    """
    found = []
    for leaf in tree_leaves(value):
        numbers = [*leaf.shape, *leaf.stride()] if isinstance(leaf, Tensor) else [leaf]
        for number in numbers:
            if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                found.append((number.node.expr, number))
    return found


def symbols_of(nodes: Sequence[Node]) -> dict[str, Any]:
    """The symbols that nodes need, by name, as PyTorch's symbolic numbers."""
    found: dict[str, Any] = {}
    for node in nodes:
        others = [n.meta.get("val") for n in node.all_input_nodes]
        plain = [
            leaf for leaf in tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, Node)
        ]
        for expression, number in expressions_in((node.meta.get("val"), others, plain)):
            for symbol in expression.free_symbols:
                if str(symbol) not in found:
                    found[str(symbol)] = _symbolic(symbol, number)
    return found


def _symbolic(symbol: sympy.Symbol, like: Any) -> Any:
    env = like.node.shape_env
    hints = getattr(env, "backed_var_to_val", None)
    if hints is None:  # PyTorch 2.11
        hints = env.var_to_val
    value = hints.get(symbol)
    if symbol.is_integer:
        return env.create_symintnode(symbol, hint=None if value is None else int(value))
    return env.create_symfloatnode(symbol, hint=None if value is None else float(value))


Read = Callable[[Sequence[Any]], Any]
"""Gives a number of a call's arguments."""


def readers_of(placeholders: Sequence[Node]) -> dict[str, Read]:
    """How each symbol is read from a call's arguments."""
    found: dict[str, Read] = {}

    def add(number: Any, read: Read) -> None:
        if isinstance(number, (torch.SymInt, torch.SymFloat)) and number.node.expr.is_Symbol:
            found.setdefault(str(number.node.expr), read)

    tensors: list[tuple[int, Tensor]] = []
    for position, node in enumerate(placeholders):
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            add(value, argument_at(position))
            continue
        tensors.append((position, value))
        for dim, size in enumerate(value.shape):
            add(size, lambda a, p=position, d=dim: int(a[p].shape[d]))  # type: ignore[misc]
        for dim, stride in enumerate(value.stride()):
            add(stride, lambda a, p=position, d=dim: int(a[p].stride(d)))  # type: ignore[misc]
    for position, value in tensors:  # last: see `expressions_in`
        add(value.storage_offset(), lambda a, p=position: int(a[p].storage_offset()))  # type: ignore[misc]
    return found


def argument_at(position: int) -> Read:
    """Gives the argument at a position."""
    return lambda arguments: arguments[position]


BoxedFunction = Callable[[list[Any]], Sequence[Any]]


def take_numbers(graph: GraphModule, numbers: Sequence[torch.SymInt]) -> None:
    """Adds integers to the arguments of a graph, as its last ones."""
    for k, number in enumerate(numbers):
        add_argument(graph.graph, f"number{k}", number)
    if numbers:
        graph.recompile()


class WithNumbers:
    """A compiled graph, called without the arguments that `take_numbers` added to it.

    Args:
        compiled: the graph.
        placeholders: the arguments before those that were added.
        numbers: what was added.

    Raises:
        UnsupportedOp: a number does not follow from the arguments.
    """

    _boxed_call = True

    def __init__(
        self,
        compiled: BoxedFunction,
        placeholders: Sequence[Node],
        numbers: Sequence[torch.SymInt],
    ) -> None:
        self._compiled = compiled
        self._numbers = [number_of(number) for number in numbers]
        names = {name for number in self._numbers for name in number.names}
        readers = readers_of(placeholders)
        missing = sorted(names - set(readers))
        if missing:
            raise UnsupportedOp(
                "symbolic size",
                f"{', '.join(missing)} in {', '.join(map(str, numbers))} is no argument's size",
                "mark that dimension static (torch._dynamo.mark_static) or compile with "
                "dynamic=False",
            )
        self._readers = [(name, readers[name]) for name in sorted(names)]

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        symbols = {name: read(arguments) for name, read in self._readers}
        given = [*arguments, *(number.of(symbols) for number in self._numbers)]
        arguments.clear()
        return self._compiled(given)
