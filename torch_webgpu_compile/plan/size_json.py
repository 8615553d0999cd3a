"""`Expr` to JSON and back.

An expression is a number, or ``{"c": constant, "t": [[coefficient, atom, …], …]}``; an atom is
``[symbol's name, lower bound]``, ``["//", numerator, denominator]`` or ``["%", …]``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..symbolic.sizes import INT64, Atom, Expr, FloorDiv, Symbol, as_expr, floordiv, mod, symbol

Json = Any

# Of plans that this package makes, the longest expressions have 30 terms.
_MAX_TERMS = 512
_MAX_DEGREE = 32
_DIVISIONS = {"//": floordiv, "%": mod}
_symbol = lru_cache(1 << 10)(symbol)


def encode_expr(expr: Expr) -> Json:
    """An expression as JSON. Raises ValueError for one with an iteration symbol."""
    if not isinstance(expr, Expr):
        raise ValueError(f"a size expected, not {expr!r}")
    if expr.is_constant:
        return expr.constant
    return {"c": expr.constant, "t": [[c, *map(_encode_atom, atoms)] for atoms, c in expr.terms]}


def _encode_atom(atom: Atom) -> Json:
    if isinstance(atom, Symbol):
        if atom.extent is not None:
            raise ValueError(f"a plan cannot hold the iteration symbol {atom}")
        return [atom.name, atom.lower]
    sign = "//" if isinstance(atom, FloorDiv) else "%"
    return [sign, encode_expr(atom.numerator), encode_expr(atom.denominator)]


def decode_expr(data: Json) -> Expr:
    """The expression that `encode_expr` was given. Raises ValueError for anything else.

    The time that it takes is bounded by the length of ``data``, also where products of sums would
    grow without end.
    """
    if type(data) is int:
        return as_expr(_integer(data))
    if type(data) is not dict or data.keys() != {"c", "t"} or type(data["t"]) is not list:
        raise ValueError("this is no size")
    total = as_expr(_integer(data["c"]))
    for term in data["t"]:
        total = _bounded(total + _decode_term(term))
    return total


def _decode_term(data: Json) -> Expr:
    if type(data) is not list or not 0 < len(data) <= _MAX_DEGREE:
        raise ValueError("this is no term of a size, or one of too high a degree")
    product = as_expr(_integer(data[0]))
    for atom in data[1:]:
        product = _bounded(product * _decode_atom(atom))
    return product


def _decode_atom(data: Json) -> Expr:
    match data:
        case [str(name), lower]:
            return _symbol(name, _integer(lower))
        case ["//" | "%" as sign, over, under]:
            denominator = decode_expr(under)
            if denominator.is_constant and denominator.constant <= 0:
                raise ValueError("a division by a number that is not positive")
            return _DIVISIONS[sign](decode_expr(over), denominator)
    raise ValueError("this is no symbol and no division")


def _integer(data: Json) -> int:
    if type(data) is not int or data not in INT64:
        raise ValueError("a 64-bit integer expected")
    return data


def _bounded(expr: Expr) -> Expr:
    """An expression that did not grow beyond what plans have: products of sums can."""
    if len(expr.terms) > _MAX_TERMS:
        raise ValueError("a size has too many terms")
    _integer(expr.constant)
    for _, coefficient in expr.terms:
        _integer(coefficient)
    return expr
