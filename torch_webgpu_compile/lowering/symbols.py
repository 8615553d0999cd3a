"""The border to PyTorch's types: symbolic sizes, dtypes and constants.

PyTorch's symbolic integers are sympy expressions over symbols; lowering works on `sizes.Expr`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch

from .. import dtypes
from ..dtypes import DType
from ..errors import UnsupportedOp
from ..ir.numeric import round_to
from ..ir.scalar import Const, Index, Scalar, apply, cast, const
from ..symbolic.size_classes import size_class
from ..symbolic.sizes import (
    INT64,
    LARGEST_SIZE,
    ONE,
    Expr,
    as_expr,
    ceildiv,
    floordiv,
    maximum,
    middle,
    minimum,
    mod,
    symbol,
    symbols_of,
)
from ..torch_private import (
    CeilDiv,
    CleanDiv,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    Identity,
    IntTrueDiv,
    Max,
    Min,
    Mod,
    ModularIndexing,
    OpaqueUnaryFn_sqrt,
    PowByNatural,
    PythonMod,
    ToFloat,
    TruncToInt,
    statically_known_true,
    tree_leaves,
)

Number = bool | int | float


def literal(value: Number, dtype: DType) -> Const:
    """A constant rounded to ``dtype``, so that a later cast cannot show digits it never had."""
    return const(_rounded(float(value), dtype) if dtype.is_float else value, dtype)


def _rounded(value: float, dtype: DType) -> float:
    # NumPy, because PyTorch's own tensors are fake while a graph is compiled.
    with np.errstate(over="ignore"):
        return float(round_to(np.asarray(value), dtype))


def _symbol_range(expr: sympy.Symbol, node: Any) -> tuple[int, int | None, int | None]:
    """The least and the largest value of a size, if that is known, else what it usually is like.

    The least is 2 for a size that ShapeEnv has specialised away from 0 and 1. A number of the
    caller's of which nothing is known may be any int64.
    """
    env = getattr(node, "shape_env", None)
    bounds = getattr(env, "var_to_range", {}).get(expr)
    if bounds is None:
        return 2 if str(expr).startswith("s") else 0, None, None
    lower = max(INT64[0], int(bounds.lower)) if bounds.lower.is_Integer else INT64[0]
    most = int(bounds.upper) if bounds.upper.is_Integer else None
    if most is not None and most < LARGEST_SIZE:
        return lower, most, None
    return lower, None, _usual(expr, env) if lower >= 0 else None


def _usual(name: sympy.Symbol, env: Any) -> int | None:
    """A size in the class of the one that a graph is traced with, None if that is unknown.

    Classes, not sizes: of graphs that differ in it each is compiled.
    """
    hint = env.backed_var_to_val.get(name)
    if hint is None:
        return None
    found = size_class(int(hint))
    if found is None or found.most is None:
        return int(hint)
    return found.unit * middle(found.lower, found.most)


class SizeReader:
    """Converts sizes to `Expr`; one per graph, so that a symbol keeps its lower bound.

    ``numbers`` are the values of expressions of symbolic floats, by their text.
    """

    def __init__(self) -> None:
        self._symbols: dict[str, Expr] = {}
        self._ones: dict[sympy.Expr, bool] = {}
        self._quotients: dict[sympy.Expr, int | None] = {}
        self.numbers: dict[str, Scalar] = {}
        self._given: dict[sympy.Expr, Expr] = {}
        self.known: frozenset[str] = frozenset()

    def take(self, arguments: Iterable[Any]) -> None:
        """Takes the integers among a graph's arguments.

        One that cannot be expressed by sizes is a symbol from now on.
        """
        for value in arguments:
            if isinstance(value, torch.SymInt) and not value.node.is_constant():
                try:
                    self._integer(value.node.expr, value.node)
                except UnsupportedOp:
                    self._give(value.node.expr, value.node)

    def _give(self, expr: sympy.Expr, node: Any) -> None:
        least = node.shape_env.bound_sympy(expr).lower
        lower = max(INT64[0], int(least)) if least.is_Integer else INT64[0]
        self._given[expr] = symbol(f"number{len(self._given)}", lower)

    def know_all(self) -> None:
        """Sets ``known``: the symbols read so far are the ones that the arguments give."""
        given = (name for expr in self._given.values() for name in map(str, symbols_of(expr)))
        self.known = frozenset(self._symbols).union(given)

    def size(self, value: int | torch.SymInt) -> Expr:
        """An integer or SymInt; raises UnsupportedOp when it cannot be expressed."""
        if isinstance(value, torch.SymInt):
            if value.node.is_constant():
                return as_expr(int(value))
            return ONE if self._is_one(value) else self._integer(value.node.expr, value.node)
        return as_expr(int(value))

    def _is_one(self, value: torch.SymInt) -> bool:
        """Whether tracing has guarded that a size is 1: by broadcasting it, perhaps."""
        expr, hint = value.node.expr, value.node.hint
        if expr.is_Symbol or hint is None or hint != 1:
            return False
        if expr not in self._ones:
            self._ones[expr] = statically_known_true(value == 1)
        return self._ones[expr]

    def _guarded(self, expr: sympy.Expr, node: Any) -> int | None:
        """The number that tracing has guarded a quotient or remainder to be, if it has.

        PyTorch keeps ``s // (s // 8)`` where it has found that this is 8, a head size perhaps: it
        puts numbers in the place of symbols only.
        """
        if expr not in self._quotients:
            value = node.shape_env.create_symintnode(expr, hint=None)
            hint = value.node.hint
            is_known = hint is not None and statically_known_true(value == hint)
            self._quotients[expr] = int(hint) if is_known else None
        return self._quotients[expr]

    def sizes(self, values: Iterable[int | torch.SymInt]) -> tuple[Expr, ...]:
        """Several sizes."""
        return tuple(self.size(value) for value in values)

    def strides(self, values: Iterable[int | torch.SymInt]) -> tuple[Expr, ...]:
        """Several strides; PyTorch writes max(1, size) where only an empty tensor has size 0."""
        one = sympy.Integer(1)

        def inner(expr: sympy.Expr) -> sympy.Expr:
            def of_max(*arguments: sympy.Expr) -> sympy.Expr:
                rest = [a for a in arguments if a != one]
                return rest[0] if len(rest) == 1 else Max(*arguments)  # type: ignore[no-untyped-call]

            return expr.replace(Max, of_max)

        return tuple(
            self._integer(inner(value.node.expr), value.node)
            if isinstance(value, torch.SymInt)
            else as_expr(value)
            for value in values
        )

    def symbolic_scalar(self, value: torch.SymFloat | torch.SymBool) -> Scalar:
        """A symbolic number computed in the kernel, as Python does: in float64, or as bool."""
        return self._scalar(value.node.expr, value.node)

    def _symbol(self, expr: sympy.Symbol, node: Any) -> Expr:
        name = str(expr)
        if name not in self._symbols:
            self._symbols[name] = symbol(name, *_symbol_range(expr, node))
        return self._symbols[name]

    def _integer(self, expr: sympy.Expr, node: Any) -> Expr:
        if expr.is_Integer:
            return as_expr(int(expr))
        if isinstance(expr, sympy.Symbol):
            return self._symbol(expr, node)
        if expr in self._given:
            return self._given[expr]
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            total = self._integer(expr.args[0], node)
            for arg in expr.args[1:]:
                term = self._integer(arg, node)
                total = total + term if isinstance(expr, sympy.Add) else total * term
            return total
        if isinstance(expr, (sympy.Pow, PowByNatural)) and expr.args[1].is_Integer:
            total = ONE
            for _ in range(int(expr.args[1])):
                total = total * self._integer(expr.args[0], node)
            return total
        if isinstance(expr, Identity):
            return self._integer(expr.args[0], node)
        if type(expr) in _EXTREMES:
            return reduce(_EXTREMES[type(expr)], (self._integer(arg, node) for arg in expr.args))
        if type(expr) in _INTEGER_PAIRS:
            number = self._guarded(expr, node)
            if number is not None:
                return as_expr(number)
            left, right = (self._integer(arg, node) for arg in expr.args)
            return _INTEGER_PAIRS[type(expr)](left, right)
        if isinstance(expr, ModularIndexing):
            base, divisor, modulus = (self._integer(arg, node) for arg in expr.args)
            return mod(floordiv(base, divisor), modulus)
        if isinstance(expr, (TruncToInt, FloorToInt)):
            scaled = self._scaled(expr.args[0], node)
            if scaled is not None:
                return scaled
        return self._unknown(expr, node)

    def _unknown(self, expr: sympy.Expr, node: Any) -> Expr:
        raise UnsupportedOp(
            "symbolic size",
            f"{expr} ({type(expr).__name__}) is not sums, products, //, %, min or max of sizes",
            "mark that dimension static (torch._dynamo.mark_static) or compile with dynamic=False",
        )

    def _scaled(self, expr: sympy.Expr, node: Any) -> Expr | None:
        """⌊c · size⌋ as a quotient of integers (a scale factor); None if float64 may round it."""
        factors = expr.args if isinstance(expr, sympy.Mul) else (expr,)
        sizes = [f.args[0] for f in factors if isinstance(f, ToFloat)]
        numbers = [float(f) for f in factors if isinstance(f, sympy.Float)]
        if len(sizes) != 1 or len(numbers) != len(factors) - 1:
            return None
        numerator, denominator = prod(numbers, start=1.0).as_integer_ratio()
        # Products with sizes stay far below 2^53, and in i32 for sizes up to 2^23.
        if not 0 < numerator <= 256 or denominator > 256:
            return None
        return floordiv(self._integer(sizes[0], node) * numerator, as_expr(denominator))

    def _truth(self, expr: sympy.logic.boolalg.Boolean, node: Any) -> Scalar:
        """A comparison of sizes."""
        if isinstance(expr, sympy.Not):
            return apply("eq", self._truth(expr.args[0], node), const(False, dtypes.bool_))
        if isinstance(expr, (sympy.And, sympy.Or)):
            name = "bitwise_and" if isinstance(expr, sympy.And) else "bitwise_or"
            return reduce(partial(apply, name), (self._truth(arg, node) for arg in expr.args))
        if type(expr) in _COMPARISONS:
            return apply(_COMPARISONS[type(expr)], *(self._scalar(a, node) for a in expr.args))
        return const(bool(expr), dtypes.bool_)

    def _scalar(self, expr: sympy.Expr, node: Any) -> Scalar:
        f64 = dtypes.float64
        if self.numbers and str(expr) in self.numbers:
            return self.numbers[str(expr)]
        if expr.is_number and not expr.is_Integer:
            return const(float(expr), f64)
        if isinstance(expr, ToFloat):
            return cast(self._scalar(expr.args[0], node), f64)
        if isinstance(expr, _TRUTHS):
            return self._truth(expr, node)
        if type(expr) in _FLOAT_PAIRS or (isinstance(expr, sympy.Pow) and expr.is_integer is False):
            left, right = (cast(self._scalar(arg, node), f64) for arg in expr.args)
            return apply(_FLOAT_PAIRS.get(type(expr), "pow"), left, right)
        if isinstance(expr, OpaqueUnaryFn_sqrt):
            return apply("sqrt", cast(self._scalar(expr.args[0], node), f64))
        if isinstance(expr, (sympy.Add, sympy.Mul)) and not expr.is_integer:
            name = "add" if isinstance(expr, sympy.Add) else "mul"
            total = cast(self._scalar(expr.args[0], node), f64)
            for arg in expr.args[1:]:
                total = apply(name, total, cast(self._scalar(arg, node), f64))
            return total
        return Index(self._integer(expr, node))


class _Finder(SizeReader):
    """Reads what a `SizeReader` would; ``unknown`` are the integers that it could not express."""

    def __init__(self, reader: SizeReader) -> None:
        super().__init__()
        self._given = reader._given
        self.unknown: dict[sympy.Expr, torch.SymInt] = {}

    def _unknown(self, expr: sympy.Expr, node: Any) -> Expr:
        if not expr.is_integer:
            return super()._unknown(expr, node)
        self.unknown[expr] = node.shape_env.create_symintnode(expr, hint=None)
        return ONE


def unknown_integers(graph: torch.fx.Graph) -> list[torch.SymInt]:
    """The integers in a captured graph that are not made of sizes by what `Expr` has.

    ``int(0.3 * n)`` is one, and the absolute value. Who calls the graph computes them, and gives
    them as arguments: see `SizeReader.take`.
    """
    if not any(_is_symbolic(leaf) for n in graph.nodes for leaf in tree_leaves(n.meta.get("val"))):
        return []
    reader = SizeReader()
    reader.take(node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    finder = _Finder(reader)
    for node in graph.nodes:
        for leaf in tree_leaves((node.meta.get("val"), node.args, node.kwargs)):
            with suppress(UnsupportedOp):  # a number that is no integer: lowering says so
                _read(finder, leaf)
    return list(finder.unknown.values())


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt)


def _read(reader: SizeReader, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        reader.sizes(leaf.shape)
        reader.strides(leaf.stride())
    elif isinstance(leaf, torch.SymInt):
        reader.size(leaf)
    elif isinstance(leaf, (torch.SymFloat, torch.SymBool)):
        reader.symbolic_scalar(leaf)


_INTEGER_PAIRS: dict[type, Callable[[Expr, Expr], Expr]] = {
    FloorDiv: floordiv,
    CleanDiv: floordiv,
    CeilDiv: ceildiv,
    Mod: mod,
    PythonMod: mod,
}
_TRUTHS = (sympy.Rel, sympy.And, sympy.Or, sympy.Not, sympy.logic.boolalg.BooleanAtom)
_COMPARISONS: dict[type, str] = {
    sympy.StrictGreaterThan: "gt",
    sympy.GreaterThan: "ge",
    sympy.StrictLessThan: "lt",
    sympy.LessThan: "le",
    sympy.Equality: "eq",
    sympy.Unequality: "ne",
}
_EXTREMES: dict[type, Callable[[Expr, Expr], Expr]] = {
    Max: maximum,
    Min: minimum,
    sympy.Max: maximum,
    sympy.Min: minimum,
}
_FLOAT_PAIRS: dict[type, str] = {
    IntTrueDiv: "div",
    FloatTrueDiv: "div",
    FloatPow: "pow",
}
