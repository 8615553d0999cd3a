"""Replaces index symbols of a scalar by values from data, which makes it a gather."""

from __future__ import annotations

from collections.abc import Mapping

from .. import dtypes
from ..symbolic.sizes import (
    ONE,
    ZERO,
    Expr,
    FloorDiv,
    Symbol,
    as_expr,
    atom_expr,
    substitute,
    symbols_of,
)
from .scalar import Index, Scalar, apply, const, rewrite


def substitute_scalars(
    body: Scalar, exprs: Mapping[Symbol, Expr], data: Mapping[Symbol, Scalar]
) -> Scalar:
    """``body`` with some symbols replaced by expressions and others by values from data."""

    def change(node: Scalar) -> Scalar | None:
        if not isinstance(node, Index):
            return None
        if symbols_of(node.expr).isdisjoint(data):
            return Index(substitute(node.expr, exprs))
        return _arithmetic(node.expr, exprs, data)

    return rewrite(body, change)


def _arithmetic(expr: Expr, exprs: Mapping[Symbol, Expr], data: Mapping[Symbol, Scalar]) -> Scalar:
    """An index expression as int64 scalar ops, where it depends on data."""
    total: Scalar | None = None
    plain = as_expr(expr.constant)
    for monomial, coefficient in expr.terms:
        factor = as_expr(coefficient)
        term: Scalar | None = None
        for atom in monomial:
            if isinstance(atom, Symbol):
                replaced = data.get(atom)
                if replaced is None:
                    factor = factor * exprs.get(atom, atom_expr(atom))
                    continue
            elif symbols_of(atom_expr(atom)).isdisjoint(data):
                factor = factor * substitute(atom_expr(atom), exprs)
                continue
            else:
                name = "floor_divide" if isinstance(atom, FloorDiv) else "remainder"
                replaced = apply(
                    name,
                    _arithmetic(atom.numerator, exprs, data),
                    _arithmetic(atom.denominator, exprs, data),
                )
            term = replaced if term is None else apply("mul", term, replaced)
        if term is None:
            plain = plain + factor
            continue
        if factor is not ONE:
            term = apply("mul", term, _index_scalar(factor))
        total = term if total is None else apply("add", total, term)
    if total is None:
        return Index(plain)
    return total if plain is ZERO else apply("add", total, _index_scalar(plain))


def _index_scalar(expr: Expr) -> Scalar:
    return const(expr.constant, dtypes.int64) if expr.is_constant else Index(expr)
