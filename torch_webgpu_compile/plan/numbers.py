"""Floats that the host computes from sizes, for kernels that need them exactly."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..symbolic.sizes import INT64, Expr, Symbol, evaluate, symbols_of


@dataclass(frozen=True, slots=True)
class HostNumber:
    """A float64 computed from sizes, which a kernel gets rounded to float32.

    Attributes:
        op: a row of `NUMBER_OPS`.
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

NUMBER_ARITY = {name: 1 if name in ("float", "neg", "sqrt") else 2 for name in NUMBER_OPS}
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
