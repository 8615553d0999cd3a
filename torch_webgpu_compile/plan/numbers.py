"""Numbers that the host computes of sizes and of other numbers.

Floats that kernels need exactly, and what composed plans decide by.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..symbolic.sizes import INT64, Expr, Symbol, evaluate, symbols_of


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A number computed from others; a kernel gets it rounded to float32.

    Attributes:
        op: a row of `PYTHON_OPS`; of `NUMBER_OPS`, if it is a kernel's.
        args: operands; an `Expr` is an integer.

    Raises:
        ValueError: there is no such function of so many operands.
    """

    op: str
    args: tuple[HostNumber | Expr | float, ...]

    def __post_init__(self) -> None:
        if NUMBER_ARITY.get(self.op) != len(self.args):
            raise ValueError(f"no function {self.op!r} of {len(self.args)} numbers")

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


NUMBER_OPS: dict[str, Callable[..., Any]] = {
    "float": np.float64,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "pow": np.power,
}
"""What a `HostNumber` may be made of, as Python and PyTorch compute it on float64."""

PYTHON_OPS: dict[str, Callable[..., Any]] = {
    "float": float,
    "neg": operator.neg,
    "sqrt": math.sqrt,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": lambda a, b: a**b if abs(b) <= 64 else float(a) ** b,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "min": min,
    "max": max,
    "abs": abs,
    "trunc": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "round_to": round,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": lambda a, b: bool(a and b),
    "or": lambda a, b: bool(a or b),
    "not": operator.not_,
    "where": lambda condition, a, b: a if condition else b,
}
"""What a composed plan computes numbers with: Python's operators, on Python's numbers."""

_OF_ONE = ("float", "neg", "sqrt", "abs", "trunc", "floor", "ceil", "round", "not")
NUMBER_ARITY = {op: 1 if op in _OF_ONE else 3 if op == "where" else 2 for op in PYTHON_OPS}
"""How many operands each takes."""


def number_bits(number: HostNumber, sizes: Mapping[str, int]) -> int:
    """The bits of a number as float32, as a signed integer."""
    with np.errstate(all="ignore"):
        single = np.asarray(_value(number, sizes)).astype(np.float32)
    (bits,) = struct.unpack("<i", single.tobytes())
    return int(bits)


def number_symbols(number: HostNumber) -> frozenset[Symbol]:
    """The size symbols that it is made from."""
    found: frozenset[Symbol] = frozenset()
    for arg in number.args:
        if isinstance(arg, HostNumber):
            found |= number_symbols(arg)
        elif isinstance(arg, Expr):
            found |= symbols_of(arg)
    return found


def symbols_in(value: Any) -> frozenset[Symbol]:
    """The symbols of an `Expr` or a `HostNumber`; none of another value."""
    if isinstance(value, HostNumber):
        return number_symbols(value)
    return symbols_of(value) if isinstance(value, Expr) else frozenset()


def python_number(value: Any, names: Mapping[str, Any]) -> Any:
    """The value of an `Expr` or a `HostNumber` in Python's arithmetic; another value as it is.

    Raises:
        ArithmeticError, ValueError: there is none.
    """
    if isinstance(value, HostNumber):
        found = PYTHON_OPS[value.op](*[python_number(arg, names) for arg in value.args])
        if type(found) is int and found not in INT64:
            raise OverflowError(f"{value} is no 64-bit integer")
        return found
    return evaluate(value, names) if isinstance(value, Expr) else value


def _value(number: HostNumber, sizes: Mapping[str, int]) -> Any:
    args = [_argument(arg, sizes) for arg in number.args]
    if number.op == "float" and isinstance(args[0], np.int64):
        return args[0]  # float32 rounds it once
    return NUMBER_OPS[number.op](*map(np.float64, args))


def _argument(arg: HostNumber | Expr | float, sizes: Mapping[str, int]) -> Any:
    if isinstance(arg, HostNumber):
        return _value(arg, sizes)
    if not isinstance(arg, Expr):
        return arg
    integer = evaluate(arg, sizes)
    return np.int64(integer) if integer in INT64 else float(integer)
