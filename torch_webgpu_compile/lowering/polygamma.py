"""Derivatives of the digamma function. Source of the operator: ATen ``polygamma``."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from ..ir.scalar import Scalar, apply
from ..symbolic.sizes import IntLike
from .builder import Builder
from .pointwise import elementwise
from .promotion import float_dtype
from .registry import NotLowered, lowers
from .series import is_double, number, polynomial
from .special import lower_digamma
from .value import Value

aten = torch.ops.aten

# Coefficients grow as n!: those of derivative 20 still fit float32. Beyond, the zeta function.
_MOST = 20


def _bernoulli(count: int) -> list[Fraction]:
    """B₀, B₁, …: Σ over j ≤ k of C(k + 1, j) Bⱼ is 0."""
    found: list[Fraction] = []
    for k in range(count):
        total = sum((math.comb(k + 1, j) * found[j] for j in range(k)), Fraction(0))
        found.append(Fraction(1) if k == 0 else -total / (k + 1))
    return found


def _power(x: Scalar, n: int) -> Scalar:
    """x to the n ≥ 1, by multiplication."""
    if n == 1:
        return x
    half = _power(apply("square", x), n // 2)
    return apply("mul", half, x) if n % 2 else half


def _hurwitz_zeta(x: Scalar, s: int) -> Scalar:
    """Σ over k ≥ 0 of 1 / (x + k)ˢ for x ≥ ½: some terms, then Euler's and Maclaurin's formula."""
    steps, terms = (12, 9) if is_double(x) else (8, 4)
    total: Scalar | None = None
    for k in range(steps):
        term = apply("reciprocal", _power(apply("add", x, number(float(k), x)), s))
        total = term if total is None else apply("add", total, term)
    assert total is not None
    y = apply("add", x, number(float(steps), x))
    # y^(1-s) · (1 / (s - 1) + (½ + rest) / y), where the rest is the sum over j of
    # B₂ⱼ / (2j)! · s (s + 1) … (s + 2j - 2) / y^(2j-1).
    bernoulli = _bernoulli(2 * terms + 1)
    factors = []
    for j in range(1, terms + 1):
        rising = math.prod(range(s, s + 2 * j - 1))
        factors.append(float(bernoulli[2 * j] * rising / math.factorial(2 * j)))
    inverse = apply("reciprocal", y)
    series = apply("mul", polynomial(apply("square", inverse), factors[::-1]), inverse)
    tail = apply("mul", apply("add", series, number(0.5, x)), inverse)
    tail = apply("add", tail, number(1 / (s - 1), x))
    return apply("add", total, apply("mul", tail, _power(inverse, s - 1)))


def _cotangent_derivative(n: int) -> list[int]:
    """The nth derivative of cot as a polynomial in cot, lowest power first: P' · -(1 + c²)."""
    found = [0, 1]
    for _ in range(n):
        slope = [k * factor for k, factor in enumerate(found)][1:]
        found = [0] * (len(slope) + 2)
        for k, factor in enumerate(slope):
            found[k] -= factor
            found[k + 2] -= factor
    return found


def _cotangent_of_turns(fraction: Scalar) -> Scalar:
    """cot(π · fraction) from -½ to ½: tan(π · (½ - fraction)) beyond ¼, which is exact at ½."""
    size, half = apply("abs", fraction), number(0.5, fraction)
    beyond = apply("gt", size, number(0.25, fraction))
    turns = apply("where", beyond, apply("sub", half, size), size)
    tangent = apply("tan", apply("mul", turns, number(math.pi, fraction)))
    cotangent = apply("where", beyond, tangent, apply("reciprocal", tangent))
    return apply(
        "where", apply("lt", fraction, number(0, fraction)), apply("neg", cotangent), cotangent
    )


def _polygamma(x: Scalar, n: int) -> Scalar:
    """(-1)ⁿ⁺¹ n! ζ(n + 1, x), or below ½ by reflection -πⁿ⁺¹ cot⁽ⁿ⁾(πx) - n! ζ(n + 1, 1 - x)."""
    below = apply("lt", x, number(0.5, x))
    at = apply("where", below, apply("sub", number(1, x), x), x)
    sign = 1.0 if n % 2 else -1.0
    zeta = apply("mul", _hurwitz_zeta(at, n + 1), number(float(math.factorial(n)), x))
    fraction = apply("sub", x, apply("round", x))
    cotangent = _cotangent_of_turns(fraction)
    factors = [float(factor) * math.pi ** (n + 1) for factor in _cotangent_derivative(n)]
    reflected = apply("neg", apply("add", polynomial(cotangent, factors[::-1]), zeta))
    value = apply("where", below, reflected, apply("mul", zeta, number(sign, x)))
    whole = apply("eq", fraction, number(0, x))
    if n > 1:  # to PyTorch, -∞ is one of the negative integers, and ∞ · 0 is in its sum for ∞
        value = apply("where", apply("eq", x, number(math.inf, x)), number(math.nan, x), value)
        whole = apply("bitwise_or", whole, apply("isinf", x))
    pole = apply("bitwise_and", whole, below)
    return apply("where", pole, number(sign * math.inf, x), value)


def _by_zeta(x: Scalar, n: int) -> Scalar:
    """±n! ζ(n + 1, x), infinite where the factorial is, as in ATen ``calc_polygamma``."""
    largest = 1.7976931348623157e308 if is_double(x) else 3.4028234663852886e38
    factorial = math.factorial(n) if n <= 170 else math.inf
    size = math.inf if factorial > largest else float(factorial)
    zeta = apply("zeta", number(float(n + 1), x), x)
    return apply("mul", zeta, number(size if n % 2 else -size, x))


@lowers(aten.polygamma.default)
def lower_polygamma(builder: Builder, n: IntLike, self: Value) -> Value:
    """The ``n``-th derivative of digamma; integers are computed in the default float dtype.

    Raises NotLowered: for an ``n`` that is a symbolic size.
    """
    if n == 0:
        return lower_digamma(builder, self)
    if not isinstance(n, int):
        raise NotLowered(f"derivative {n} of the digamma function: n is not a number")
    if n > _MOST:
        return elementwise(builder, lambda x: _by_zeta(x, n), self, dtype=float_dtype(self.dtype))
    return elementwise(builder, lambda x: _polygamma(x, n), self, dtype=float_dtype(self.dtype))
