"""Numbers made of symbols: what the host computes of sizes for the graphs that it calls."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from sympy.logic.boolalg import BooleanAtom  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx import GraphModule, Node

from ...errors import UnsupportedOp
from ...plan.numbers import NUMBER_ARITY, HostNumber, python_number, symbols_in
from ...symbolic.sizes import (
    Expr,
    as_expr,
    floordiv,
    maximum,
    minimum,
    mod,
    product,
    symbol,
)
from ...torch_private import PythonPrinter, tree_leaves
from ..fx_graphs import add_argument


def number_of(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """A symbolic number as plans have it: an `Expr`, a `HostNumber`, or a float.

    Raises:
        UnsupportedOp: it is made with a function that plans do not have.
    """
    return _number(value.node.expr)


def _number(expression: sympy.Basic) -> Any:
    kind = type(expression).__name__
    if expression.is_Symbol:
        return symbol(str(expression))
    if expression.is_Integer or isinstance(expression, BooleanAtom):
        return as_expr(int(bool(expression) if kind.startswith("Boolean") else expression))
    if expression.is_Float:
        return float(expression)
    if expression.is_Rational:
        return HostNumber("div", (as_expr(expression.p), as_expr(expression.q)))
    if kind == "Piecewise":
        *others, (last, _) = expression.args
        found = _number(last)
        for chosen, condition in reversed(others):
            found = HostNumber("where", (_number(condition), _number(chosen), found))
        return found
    args = [_number(arg) for arg in expression.args]
    match kind:
        case "Identity":
            return args[0]
        case "ModularIndexing":
            return HostNumber("mod", (HostNumber("floordiv", (args[0], args[1])), args[2]))
        case "TruncToFloat":
            return HostNumber("float", (HostNumber("trunc", (args[0],)),))
    op = _OPS.get(kind)
    if op is None:
        raise UnsupportedOp(
            "symbolic size",
            f"{expression} ({kind}) is made with a function that plans do not have",
            "mark that dimension static (torch._dynamo.mark_static) or compile with dynamic=False",
        )
    if NUMBER_ARITY[op] == 2 and len(args) > 2:
        return reduce(lambda left, right: HostNumber(op, (left, right)), args)
    return HostNumber(op, tuple(args))


_OPS = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "IntTrueDiv": "div",
    "FloatTrueDiv": "div",
    "Max": "max",
    "Min": "min",
    "Abs": "abs",
    "ToFloat": "float",
    "TruncToInt": "trunc",
    "FloorToInt": "floor",
    "CeilToInt": "ceil",
    "floor": "floor",
    "ceiling": "ceil",
    "RoundToInt": "round",
    "RoundDecimal": "round_to",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Where": "where",
}
"""By the names of PyTorch's and SymPy's functions, those of plans."""


def size_of(value: int | torch.SymInt) -> Expr:
    """A size or stride of an argument as a plan has it.

    Raises:
        UnsupportedOp: it is no sum, product, quotient or remainder of sizes.
    """
    return as_expr(value) if isinstance(value, int) else _as_size(number_of(value))


def _as_size(number: Any) -> Expr:
    if isinstance(number, Expr):
        return number
    if isinstance(number, HostNumber) and number.op in _SIZE_OPS:
        return _SIZE_OPS[number.op](*map(_as_size, number.args))
    raise UnsupportedOp(
        "symbolic size",
        f"{number} is no size of an argument",
        "mark that dimension static (torch._dynamo.mark_static) or compile with dynamic=False",
    )


_SIZE_OPS: dict[str, Callable[..., Expr]] = {
    "add": operator.add,
    "mul": operator.mul,
    "floordiv": floordiv,
    "mod": mod,
    "min": minimum,
    "max": maximum,
    "pow": lambda base, power: product([base] * power.constant),
}


class NumbersOf:
    """The values of expressions, called with those of their symbols.

    Attributes:
        names: of the symbols, in the order of the arguments.
    """

    def __init__(self, names: Sequence[str], text: str) -> None:
        self.names, self._text = tuple(names), text
        code = f"lambda {', '.join(names)}: [{text}]"
        self._compute: Callable[..., Sequence[Any]] = eval(code, {"math": math, "torch": torch})

    def __call__(self, *values: Any) -> Sequence[Any]:
        return self._compute(*values)

    def __reduce__(self) -> tuple[Any, ...]:
        return NumbersOf, (self.names, self._text)


def function_of(expressions: Sequence[sympy.Expr]) -> NumbersOf:
    """The function that computes expressions."""
    names = sorted({str(symbol) for e in expressions for symbol in e.free_symbols})
    printer = PythonPrinter()
    return NumbersOf(names, ", ".join(printer.doprint(expression) for expression in expressions))


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
            for free in expression.free_symbols:
                if str(free) not in found:
                    found[str(free)] = _symbolic(free, number)
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


@dataclass(frozen=True, slots=True)
class Read:
    """Gives a number of a call's arguments: one of them itself, or a number of a tensor's."""

    position: int
    field: Literal["", "size", "stride", "offset"] = ""
    dim: int = 0

    def __call__(self, arguments: Sequence[Any]) -> Any:
        value = arguments[self.position]
        match self.field:
            case "size":
                return int(value.shape[self.dim])
            case "stride":
                return int(value.stride(self.dim))
            case "offset":
                return int(value.storage_offset())
            case _:
                return value


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
            add(value, Read(position))
            continue
        tensors.append((position, value))
        for dim, size in enumerate(value.shape):
            add(size, Read(position, "size", dim))
        for dim, stride in enumerate(value.stride()):
            add(stride, Read(position, "stride", dim))
    for position, value in tensors:  # last: see `expressions_in`
        add(value.storage_offset(), Read(position, "offset"))
    return found


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
        names = {found.name for number in self._numbers for found in symbols_in(number)}
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
        given = [*arguments, *(python_number(number, symbols) for number in self._numbers)]
        arguments.clear()
        return self._compiled(given)
