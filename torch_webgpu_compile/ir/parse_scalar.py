"""Reads the text of expressions and scalars back: the inverse of `text.format_scalar`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from ..checks import IndexCheck
from ..dtypes import BY_SHORT, DType
from ..sizes import Expr, as_expr
from .scalar import Checked, Const, Index, Load, Masked, Op, Scalar, apply

FLOATS = {"inf": float("inf"), "nan": float("nan")}


class ParseError(ValueError):
    """The text is not what `text` writes."""


class Names:
    """What names mean: index symbols, buffers (by dtype) and shared subexpressions."""

    def __init__(self, symbols: Mapping[str, Expr], buffers: Mapping[str, DType]) -> None:
        self.symbols = dict(symbols)
        self.buffers = buffers
        self.shared: dict[str, Scalar] = {}

    def expr(self, tree: ast.expr) -> Expr:
        """An index expression."""
        match tree:
            case ast.Constant(value=int() as number):
                return as_expr(number)
            case ast.Name(id=name) if name in self.symbols:
                return self.symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.expr(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = self.expr(left), self.expr(right)
                match operator:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.FloorDiv():
                        return a // b
                    case ast.Mod():
                        return a % b
        raise ParseError(f"not an index expression: {ast.unparse(tree)}")

    def exprs(self, tree: ast.expr) -> tuple[Expr, ...]:
        """A list of index expressions."""
        assert isinstance(tree, (ast.List, ast.Tuple)), ast.unparse(tree)
        return tuple(self.expr(item) for item in tree.elts)

    def scalar(self, tree: ast.expr) -> Scalar:
        """A scalar expression."""
        match tree:
            case ast.Name(id=name) if name in self.shared:
                return self.shared[name]
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                entries = index.elts if isinstance(index, ast.Tuple) else [index]
                return Load(name, tuple(map(self._entry, entries)), self.buffers[name])
            case ast.Call(func=ast.Name(id="let"), args=[body], keywords=keywords):
                self.define(keywords)
                return self.scalar(body)
            case ast.Call(func=ast.Name(id="index"), args=[expr]):
                return Index(self.expr(expr))
            case ast.Call(func=ast.Name(id=name), args=[number]) if name in BY_SHORT:
                return Const(self._number(number), BY_SHORT[name])
            case ast.Call(func=ast.Name(id="checked"), args=[*operands, name, axis, line]):
                position, given, size = map(self.scalar, operands)
                op, dim, source = map(ast.literal_eval, (name, axis, line))
                return Checked(position, given, size, IndexCheck(op, source, dim))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._operation(name, [self.scalar(arg) for arg in args])
        raise ParseError(f"not a scalar: {ast.unparse(tree)}")

    def define(self, keywords: Sequence[ast.keyword]) -> None:
        """Shared subexpressions, each of which may use those before."""
        for keyword in keywords:
            assert keyword.arg is not None
            self.shared[keyword.arg] = self.scalar(keyword.value)

    def _operation(self, name: str, args: list[Scalar]) -> Scalar:
        if name == "masked":
            condition, body, other = args
            return Masked(condition, body, other)
        prefix, _, short = name.partition("_")
        if prefix in ("cast", "bitcast") and short in BY_SHORT:
            return Op(prefix, tuple(args), BY_SHORT[short])
        return apply(name, *args)

    def _entry(self, tree: ast.expr) -> Scalar:
        is_data = isinstance(tree, (ast.Call, ast.Subscript)) or (
            isinstance(tree, ast.Name) and tree.id in self.shared
        )
        return self.scalar(tree) if is_data else Index(self.expr(tree))

    def _number(self, tree: ast.expr) -> bool | int | float:
        match tree:
            case ast.Constant(value=bool() | int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.Name(id=name) if name in FLOATS:
                return FLOATS[name]
        raise ParseError(f"not a number: {ast.unparse(tree)}")


def parse_expr(text: str, symbols: Mapping[str, Expr]) -> Expr:
    """An index expression, e.g. ``4*i0 + i1//2``; ``symbols`` gives the meaning of names."""
    return Names(symbols, {}).expr(_expression(text))


def parse_scalar(text: str, symbols: Mapping[str, Expr], buffers: Mapping[str, DType]) -> Scalar:
    """A scalar as `text.format_scalar` writes it."""
    return Names(symbols, buffers).scalar(_expression(text))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
