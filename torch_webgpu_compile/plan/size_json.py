"""`Expr` to JSON and back.

An expression is a number, or ``{"c": constant, "t": [[coefficient, atom, …], …]}``; an atom is a
symbol's name, or ``["//", numerator, denominator]`` or ``["%", …]``. Lower bounds of symbols are
elsewhere: both functions take the symbols by name.
"""

from __future__ import annotations

from typing import Any

from ..sizes import INT64, Atom, Expr, FloorDiv, Symbol, as_expr, atom_expr, floordiv, mod

Json = Any
Symbols = dict[str, Expr]

# Of plans that this package makes, the deepest expression has 5 levels, the longest 30 terms.
_MAX_DEPTH = 32
_MAX_TERMS = 512
_DIVISIONS = {"//": floordiv, "%": mod}


def encode_expr(expr: Expr, symbols: Symbols) -> Json:
    """An expression as JSON. Its symbols are added to ``symbols``.

    Raises ValueError for one with an iteration symbol.
    """
    if not isinstance(expr, Expr):
        raise ValueError(f"a size expected, not {expr!r}")
    if expr.is_constant:
        return expr.constant
    terms = [[c, *(_encode_atom(atom, symbols) for atom in atoms)] for atoms, c in expr.terms]
    return {"c": expr.constant, "t": terms}


def _encode_atom(atom: Atom, symbols: Symbols) -> Json:
    if isinstance(atom, Symbol):
        if atom.extent is not None:
            raise ValueError(f"a plan cannot hold the iteration symbol {atom}")
        symbols[atom.name] = atom_expr(atom)
        return atom.name
    sign = "//" if isinstance(atom, FloorDiv) else "%"
    return [sign, encode_expr(atom.numerator, symbols), encode_expr(atom.denominator, symbols)]


def decode_expr(data: Json, symbols: Symbols, depth: int = 0) -> Expr:
    """The expression that `encode_expr` was given. Raises ValueError for anything else.

    The time that it takes is bounded by the length of ``data``, also where products of sums would
    grow without end.
    """
    match data:
        case int():
            return as_expr(_integer(data))
        case {"c": constant, "t": [*terms]} if len(data) == 2 and depth <= _MAX_DEPTH:
            total = as_expr(_integer(constant))
            for term in terms:
                total = _bounded(total + _decode_term(term, symbols, depth))
            return total
    raise ValueError("this is no size, or one that is nested too deeply")


def _decode_term(data: Json, symbols: Symbols, depth: int) -> Expr:
    if type(data) is not list or not 0 < len(data) <= _MAX_DEPTH:
        raise ValueError("this is no term of a size, or one of too high a degree")
    product = as_expr(_integer(data[0]))
    for atom in data[1:]:
        product = _bounded(product * _decode_atom(atom, symbols, depth))
    return product


def _decode_atom(data: Json, symbols: Symbols, depth: int) -> Expr:
    match data:
        case str() if data in symbols:
            return symbols[data]
        case ["//" | "%" as sign, over, under]:
            denominator = decode_expr(under, symbols, depth + 1)
            if denominator.is_constant and denominator.constant <= 0:
                raise ValueError("a division by a number that is not positive")
            return _DIVISIONS[sign](decode_expr(over, symbols, depth + 1), denominator)
    raise ValueError("this is no symbol of the plan and no division")


def _integer(data: Json) -> int:
    if type(data) is not int or data not in INT64:
        raise ValueError("a 64-bit integer expected")
    return data


def _bounded(expr: Expr) -> Expr:
    """An expression that did not grow beyond what plans have: products of sums can."""
    if len(expr.terms) > _MAX_TERMS:
        raise ValueError("a size has too many terms")
    for number in (expr.constant, *(coefficient for _, coefficient in expr.terms)):
        _integer(number)
    return expr
