"""Bessel functions of orders 0 and 1, modified ones too, and Airy's function Ai.

Far from 0 all but I are one integral (`_hankel`), near it they are power series. What is smooth in
either is fitted by a polynomial when a kernel is made. Special values are ATen's; its J, Y and Ai
leave out the leading 1 of monic denominators: PyTorch is off by up to 1e-6 just past 5, and Ai by
3e-6 just below -2.09.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.polynomial.chebyshev import cheb2poly, chebtrim

from ..ir.scalar import Scalar, apply, where
from .pointwise import lowers_elementwise
from .special import is_double, polynomial

aten = torch.ops.aten
Array = np.ndarray[Any, Any]

# The first zero of J by order, in two parts, to float32 and to float64; the square of the second.
_ZEROS = (
    ((2.404825448989868, 1.0870590460455913e-07), (2.404825557695773, -1.176691651530894e-16)),
    ((3.8317060470581055, -7.685059315313556e-08), (3.8317059702075125, -1.5269184090088067e-16)),
)
_SECOND = (30.471262343662087, 49.2184563216946)
_NODES = 40  # of Chebyshev's, more than any function here needs
_SINGLE, _DOUBLE = 1e-9, 1e-16  # what is left out of a series, of its largest term


def _fitted(function: Callable[[Array], Array], y: Scalar) -> Scalar:
    """A smooth function of [-1, 1]: its Chebyshev series, as a polynomial, to the digits of y."""
    steps = 2 * np.arange(_NODES) + 1  # of an angle that divides the circle into four times as many
    cosines = np.cos(np.pi / (2 * _NODES) * (np.outer(np.arange(_NODES), steps) % (4 * _NODES)))
    series = cosines @ function(cosines[1])
    series[0] /= 2
    series *= 2 / _NODES
    least = (_DOUBLE if is_double(y) else _SINGLE) * abs(series).max()
    return polynomial(y, cheb2poly(chebtrim(series, least))[::-1].tolist())


def _hankel(order: float, z: Array) -> Array:
    """Hankel's integral 1 / Γ(n + ½) · ∫ e⁻ᵘ (u + z u²)ⁿ⁻½ du over u > 0, 1 at z = 0.

    √(2x / π) eˣ K(x) is that of 1 / 2x, and √(πx / 2) (J + iY) that of i / 2x, turned. By the sixth
    root of u it is even and smooth, for order ⅓ too: a plain sum converges to all digits.
    """
    v = np.arange(1, 64) / 32
    terms = (
        np.exp(-(v**6)) * v ** (6 * order + 2) * (1 + np.multiply.outer(z, v**6)) ** (order - 0.5)
    )
    return np.asarray(terms.sum(-1) * (6 / 32 / math.gamma(order + 0.5)))


def _decay(x: Scalar, order: float) -> Scalar:
    """√(2x / π) eˣ K(x) for x ≥ 2."""
    return _fitted(lambda y: _hankel(order, (y + 1) / 8), 4 / x - 1)


def _oscillation(x: Scalar, order: float, least: float) -> tuple[Scalar, Scalar]:
    """The moduli of the cosine and of the sine in √(πx / 2) J(x), for x ≥ ``least``."""
    inverse = least / x
    y = apply("square", inverse) * 2 - 1

    def both(y: Array) -> Array:
        return _hankel(order, 0.5j / least * np.sqrt((y + 1) / 2))

    q = _fitted(lambda y: both(y).imag / np.sqrt((y + 1) / 2), y)
    return _fitted(lambda y: both(y).real, y), inverse * q


def _factors(order: int, count: int, shift: float | None = None) -> list[float]:
    """1 / (k! (k + n)!) for each k, times ``shift`` and the mean of both harmonic numbers."""
    factors = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(count)]
    if shift is None:
        return factors
    harmonic = np.cumsum([0.0, *(1 / np.arange(1, count + order))])
    means = (harmonic[:count] + harmonic[order : count + order]) / 2 + shift
    return [factor * float(mean) for factor, mean in zip(factors, means, strict=True)]


def _near_first(x: Scalar, order: int) -> Scalar:
    """J of 0 ≤ x ≤ 5: a polynomial in x² times its first factors."""
    square = apply("square", x)
    first, rest = _ZEROS[order][1 if is_double(x) else 0]
    angles = np.pi * (np.arange(32) + 0.5) / 32

    def over_factors(y: Array) -> Array:
        x = np.sqrt(12.5 * (y + 1))
        value = np.cos(order * angles - np.multiply.outer(x, np.sin(angles))).mean(-1)
        zero = sum(_ZEROS[order][1])
        return np.asarray(value / ((x - zero) * (x + zero) * (x**2 - _SECOND[order]) * x**order))

    factors = (x - first - rest) * (x + first) * (square - _SECOND[order])
    value = factors * _fitted(over_factors, square * 0.08 - 1)
    if order:
        return value * x
    tiny = x < (1e-4 if is_double(x) else 1e-2)
    return where(tiny, polynomial(square, (-0.25, 1)), value)


def _far(x: Scalar, order: int, second: bool) -> Scalar:
    """J, or Y if ``second``, of x > 5: P and Q times the cosine and sine of x - (2n + 1) π / 4.

    The angle is not subtracted, which would round it: cos(x - π/4) is (cos x + sin x) / √2.
    """
    p, q = _oscillation(x, order, 5)
    sine, cosine = apply("sin", x), apply("cos", x)
    total, difference = sine + cosine, sine - cosine
    turned = (total, difference) if order == 0 else (difference, -total)
    value = p * turned[1] + q * turned[0] if second else p * turned[0] - q * turned[1]
    return value * (1 / math.sqrt(math.pi)) / apply("sqrt", x)


def _bessel_j(x: Scalar, order: int) -> Scalar:
    a = abs(x)
    value = where(a <= 5, _near_first(a, order), _far(a, order, second=False))
    return where(x < 0, -value, value) if order else value


def _bessel_y(x: Scalar, order: int) -> Scalar:
    """-∞ at 0, NaN below it."""
    factors = np.array(_factors(order, 30, math.log(2) - np.euler_gamma))
    factors *= -2 / math.pi / 2**order * (-1.0) ** np.arange(30)
    y = apply("square", x) * 0.08 - 1
    regular = _fitted(lambda y: np.polyval(factors[::-1], 3.125 * (y + 1)), y)
    logarithm = apply("log", x) * _near_first(x, order)
    if order:
        regular *= x
        logarithm -= apply("reciprocal", x)
    near = regular + logarithm * (2 / math.pi)
    value = where(x < 0, math.nan, where(x <= 5, near, _far(x, order, second=True)))
    return where(apply("eq", x, 0), -math.inf, value)


@lowers_elementwise(aten.special_spherical_bessel_j0.default, to_float=True)
def _spherical(x: Scalar) -> Scalar:
    """``sin(x) / x``: 1 at 0, and 0 at the infinities."""
    factors = [(-1) ** k / math.factorial(2 * k + 1) for k in range(7)]
    small = polynomial(apply("square", x), factors[::-1])
    value = where(abs(x) < 0.5, small, apply("sin", x) / x)
    return where(apply("isinf", x), 0, value)


def _airy_series(x: Scalar) -> Scalar:
    """c₁ f - c₂ g, two power series in x³."""
    terms = 16 if is_double(x) else 9
    f, g = [1.0], [1.0]
    for k in range(1, terms):
        f.append(f[-1] / ((3 * k - 1) * (3 * k)))
        g.append(g[-1] / ((3 * k) * (3 * k + 1)))
    cube = apply("square", x) * x
    even = polynomial(cube, [0.355028053887817239260 * c for c in f[::-1]])
    odd = polynomial(cube, [0.258819403792806798405 * c for c in g[::-1]])
    return even - x * odd


@lowers_elementwise(aten.special_airy_ai.default, to_float=True)
def _airy(x: Scalar) -> Scalar:
    """The Airy function Ai; NaN at both infinities, as ATen has it."""
    a = abs(x)
    root = apply("sqrt", a)
    zeta = a * root * (2 / 3)
    scale = 1 / math.sqrt(math.pi) / apply("sqrt", root)
    above = _decay(zeta, 1 / 3) * (scale * 0.5) * apply("exp", -zeta)
    sine, cosine = apply("sin", zeta), apply("cos", zeta)
    p, q = _oscillation(zeta, 1 / 3, 2)
    below = scale * math.sqrt(0.5) * (p * (sine + cosine) + q * (cosine - sine))
    value = where(x >= 2.09, above, where(x < -2.09, below, _airy_series(x)))
    value = where(x > 103.892, 0, value)
    return where(apply("isinf", x), math.nan, value)


def _series(a: Scalar, order: int) -> Scalar:
    """I of 0 ≤ a ≤ 8."""
    quarter = apply("square", a) * 0.25
    total = polynomial(quarter, _factors(order, 27 if is_double(a) else 15)[::-1])
    return total * (a * 0.5) if order else total


def _modified_i(x: Scalar, order: int, scaled: bool) -> Scalar:
    """I of |x|, times e^-|x| if ``scaled``; order 1 has the sign of x."""
    a = abs(x)
    near = _series(a, order)
    angles = np.pi * (np.arange(1024) + 0.5) / 1024

    def rest(y: Array) -> Array:
        x = 16 / (y + 1)
        grown = np.exp(np.multiply.outer(x, np.cos(angles) - 1)) * np.cos(order * angles)
        return np.asarray(np.sqrt(x) * grown.mean(-1))

    far = _fitted(rest, 16 / a - 1) / apply("sqrt", a)
    if scaled:
        near *= apply("exp", -a)
    else:  # by halves: eᵃ is infinite before √a makes it small enough
        half = apply("exp", a * 0.5)
        far = far * half * half
    total = where(a <= 8, near, far)
    return where(x < 0, -total, total) if order else total


def _modified_k(x: Scalar, order: int, scaled: bool) -> Scalar:
    """K of x, times eˣ if ``scaled``; ∞ at 0, NaN below it."""
    quarter = apply("square", x) * 0.25
    factors = _factors(order, 16 if is_double(x) else 9, -np.euler_gamma)
    near = polynomial(quarter, factors[::-1])
    near = 1 - near * quarter * 2 if order else near
    logarithm = (apply("log", x) - math.log(2)) * _series(x, order)
    near = near / x + logarithm if order else near - logarithm
    far = _decay(x, order) * math.sqrt(math.pi / 2) / apply("sqrt", x)
    if scaled:
        near *= apply("exp", x)
    else:
        far *= apply("exp", -x)
    total = where(x < 0, math.nan, where(x <= 2, near, far))
    return where(apply("eq", x, 0), math.inf, total)


def _register(name: str, function: Callable[..., Scalar], *options: int) -> None:
    @lowers_elementwise(getattr(aten, name).default, to_float=True)
    def body(x: Scalar) -> Scalar:
        """A Bessel function of one order, of the first or second kind, modified or not.

        Names in e and ``scaled`` ones are those multiplied by an exponential.
        """
        return function(x, *options)


_register("i0", _modified_i, 0, False)
_register("special_i0e", _modified_i, 0, True)
_register("special_i1", _modified_i, 1, False)
_register("special_i1e", _modified_i, 1, True)
for _order in (0, 1):
    _register(f"special_bessel_j{_order}", _bessel_j, _order)
    _register(f"special_bessel_y{_order}", _bessel_y, _order)
    _register(f"special_modified_bessel_i{_order}", _modified_i, _order, False)
    _register(f"special_modified_bessel_k{_order}", _modified_k, _order, False)
    _register(f"special_scaled_modified_bessel_k{_order}", _modified_k, _order, True)
