"""Scalar expressions that special functions are made of."""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..ir.scalar import Scalar, apply, const


def number(value: float, like: Scalar) -> Scalar:
    """A constant of the dtype of ``like``."""
    return const(value, like.dtype)


def polynomial(x: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Horner's rule, the coefficient of the highest power first."""
    total = number(coefficients[0], x)
    for coefficient in coefficients[1:]:
        total = apply("add", apply("mul", total, x), number(coefficient, x))
    return total


def chebyshev_sum(y: Scalar, coefficients: Sequence[float]) -> Scalar:
    """Clenshaw's rule for Σ cₖ Tₖ(y / 2), the highest first, of the last one half."""
    before, last = number(0, y), number(0, y)
    total = number(coefficients[0], y)
    for coefficient in coefficients[1:]:
        before, last = last, total
        total = apply("sub", apply("mul", y, last), before)
        total = apply("add", total, number(coefficient, y))
    return apply("mul", apply("sub", total, before), number(0.5, y))


def is_double(x: Scalar) -> bool:
    """Whether results have 53 bits, not 24."""
    return x.dtype is dtypes.float64
