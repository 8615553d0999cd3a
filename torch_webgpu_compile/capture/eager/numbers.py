"""The numbers that a graph's kernels read: what it computes of the call's own, on the host.

``1 - beta`` or ``1 / (1 - p)`` are computed once per call in float64, as PyTorch's kernels do
before they start, and rounded only then: to float32, where nothing in the call is float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph

from ...torch_private import PythonPrinter, tree_leaves


def expressions_of(graph: Graph, symbols: Mapping[str, int]) -> tuple[sympy.Expr, ...]:
    """The largest expressions of floats in a graph's arguments that are of these symbols only."""
    found: dict[sympy.Expr, None] = {}
    for node in graph.nodes:
        divides = "aten.upsample" in str(node.target) or "aten._upsample" in str(node.target)
        for leaf in tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, (torch.SymFloat, torch.SymBool)):
                # Interpolation multiplies by one over its scale.
                read = 1.0 / leaf if divides and isinstance(leaf, torch.SymFloat) else leaf
                _add(read.node.expr, symbols, found)
    return tuple(found)


def _add(expr: sympy.Expr, symbols: Mapping[str, int], found: dict[sympy.Expr, None]) -> None:
    free = expr.free_symbols
    has_floats = any(not symbol.is_integer for symbol in free)
    is_number = isinstance(expr, sympy.Expr)  # not a comparison of numbers
    if has_floats and is_number and symbols.keys() >= set(map(str, free)):
        found.setdefault(expr)
        return
    for argument in expr.args if has_floats else ():
        _add(argument, symbols, found)


@dataclass(frozen=True)
class LeafNumber:
    """An expression of floats among the leaves of a call.

    Attributes:
        text: as Python code with ``{k}`` for number k of the floats that it reads.
        leaves: what these are.
    """

    text: str
    leaves: tuple[int, ...]

    @staticmethod
    def of(expr: sympy.Expr, symbols: Mapping[str, int]) -> LeafNumber:
        """An expression of symbols, each of which is a leaf."""
        read: list[int] = []
        return LeafNumber(_Printer(symbols, read).doprint(expr), tuple(read))

    @property
    def last_leaf(self) -> int:
        """The last of the leaves that it is computed from."""
        return max(self.leaves)

    def with_leaves(self, leaves: Sequence[int]) -> LeafNumber:
        """The same of other leaves, by the position of those that it reads now."""
        return replace(self, leaves=tuple(leaves[k] for k in self.leaves))


class LeafNumbers:
    """What computes numbers from the leaves of a call.

    Attributes:
        entries: the numbers.
        dtype: of their values, float32 or float64.
        compute: gives these for leaves.
    """

    def __init__(self, entries: Sequence[LeafNumber], dtype: torch.dtype) -> None:
        self.entries = tuple(entries)
        self.dtype = dtype
        self.compute = _computed(self.entries, "d" if dtype is torch.float64 else "f")

    def __reduce__(self) -> tuple[Any, ...]:
        return LeafNumbers, (self.entries, self.dtype)


def _computed(entries: Sequence[LeafNumber], code: str) -> Callable[[Sequence[Any]], bytes]:
    printed = [entry.text.format(*(f"leaves[{k}]" for k in entry.leaves)) for entry in entries]
    text = f"lambda leaves: ({''.join(f'{expr}, ' for expr in printed)})"
    compute = eval(text, {"math": math, "torch": torch})
    compute_ieee = eval(text, {"math": np, "torch": torch})
    pack = struct.Struct(f"={len(entries)}{code}").pack

    def values(leaves: Sequence[Any]) -> bytes:
        try:
            return pack(*compute(leaves))
        except (ArithmeticError, ValueError):  # Python raises where IEEE 754 has an infinity or NaN
            with np.errstate(all="ignore"):
                wide = [np.float64(x) if type(x) is float else x for x in leaves]
                return np.array(compute_ieee(wide), code).tobytes()

    return values


class _Printer(PythonPrinter):
    """Writes braces for symbols, and notes the leaves that these are."""

    def __init__(self, symbols: Mapping[str, int], read: list[int]) -> None:
        super().__init__()
        self._leaves_by_name = symbols
        self._read = read

    def _print_Symbol(self, expr: sympy.Symbol) -> str:
        leaf = self._leaves_by_name[str(expr)]
        if leaf not in self._read:
            self._read.append(leaf)
        return f"{{{self._read.index(leaf)}}}"
