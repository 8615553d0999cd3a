"""Special functions of two arguments on NumPy arrays: their definitions.

Orthogonal polynomials follow the recurrences and the limits of ATen ``Math.h``, in the precision of
their argument, where they overflow as PyTorch's do. Hurwitz's zeta function and the incomplete
gamma functions are summed in float64 (DLMF 25.11, 8.11 and 8.9).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .scalar import POLYNOMIALS

Array = npt.NDArray[Any]
Function = Callable[[Array, Array], Array]
_MOST = 1e7  # degree or terms that a definition is run for


def _each(function: Callable[[float, float], float]) -> Function:
    def apply(a: Array, b: Array) -> Array:
        left, right = np.broadcast_arrays(a, b)
        flat = [function(float(x), float(y)) for x, y in zip(left.flat, right.flat, strict=True)]
        return np.asarray(flat, np.float64).reshape(left.shape)

    return apply


# ---- polynomials


def _degree(n: float) -> int:
    """As C++ converts it to int64: truncated, and negative for NaN and what does not fit."""
    return math.trunc(n) if -1 < n < 2.0**63 else -1


def _recurrence(first: Any, n: int, step: Callable[[int, Any, Any], Any]) -> float:
    """p(n) with p(0) = 1 and p(1) = ``first``, a NumPy scalar; Python numbers take its dtype."""
    p, q = type(first)(1), first
    if n == 0:
        return 1.0
    for k in range(1, n):
        if math.isnan(q):
            break
        p, q = q, step(k, p, q)
    return float(q)


def _chebyshev(kind: str, x: Any, n: int, closed: int) -> float:
    sign = -1.0 if n % 2 else 1.0
    if n < 0:
        return 0.0
    if abs(x) == 1:
        ends = {"t": (1, 1), "u": (n + 1, n + 1), "v": (1, 2 * n + 1), "w": (2 * n + 1, 1)}[kind]
        return float(ends[0] if x > 0 else sign * ends[1])
    if n > closed and abs(x) < 1:
        angle = math.acos(x)
        match kind:
            case "t":
                return math.cos(n * angle)
            case "u":
                return math.sin((n + 1) * angle) / math.sin(angle)
            case "v":
                return math.cos((n + 0.5) * angle) / math.cos(angle / 2)
            case _:
                return math.sin((n + 0.5) * angle) / math.sin(angle / 2)
    first = {"t": x, "u": 2 * x, "v": 2 * x - 1, "w": 2 * x + 1}[kind]
    return _recurrence(first, n, lambda k, p, q: 2 * x * q - p)


_LAST_CLOSED = {"t": (6, 6), "u": (8, 6), "v": (8, 6), "w": (8, 4)}


def _polynomial(name: str) -> Function:
    family, kind = name.rsplit("_", 1) if "_" in name else (name, "")

    def at(x: Any, degree: float, hermite_limit: int) -> float:
        n = _degree(degree)
        if family == "shifted_chebyshev":
            return _chebyshev(kind, 2 * x - 1, n, _LAST_CLOSED[kind][1])
        if family == "chebyshev":
            return _chebyshev(kind, x, n, _LAST_CLOSED[kind][0])
        if n < 0:
            return 0.0
        match family:
            case "hermite" if n > hermite_limit:
                return math.nan
            case "hermite" if kind == "h":
                return _recurrence(2 * x, n, lambda k, p, q: 2 * x * q - 2 * k * p)
            case "hermite":
                return _recurrence(x, n, lambda k, p, q: x * q - k * p)
            case "laguerre":
                if x == 0:
                    return 1.0
                return _recurrence(
                    1 - x, n, lambda k, p, q: ((2 * k + 1 - x) * q - k * p) / (k + 1)
                )
            case _:
                if abs(x) == 1:
                    return 1.0 if x > 0 or n % 2 == 0 else -1.0
                return _recurrence(x, n, lambda k, p, q: ((2 * k + 1) * x * q - k * p) / (k + 1))

    def apply(x: Array, n: Array) -> Array:
        limit = 512 if x.dtype == np.float64 else 128
        scalar = np.float64 if x.dtype == np.float64 else np.float32
        return _each(lambda a, b: at(scalar(a), b, limit))(x, n)

    return apply


# ---- Hurwitz's zeta function

_EULER_MACLAURIN = (
    1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000, 1 / 74724249600,
    -3617 / 10670622842880000, 43867 / 5109094217170944000,
)  # fmt: skip


def _power(a: float, b: float) -> float:
    return float(np.power(np.float64(a), np.float64(b)))


def _zeta_positive(s: float, q: float) -> float:
    w = q + 12
    last, total = _power(w, -s), 0.0
    if last > 0:
        rising, series = s / w, 0.5
        for k, factor in enumerate(_EULER_MACLAURIN):
            series += rising * factor
            rising *= ((s + 2 * k + 1) / w) * ((s + 2 * k + 2) / w)
        total = last * series + (last * w) / (s - 1)
    return total + sum(_power(q + k, -s) for k in range(11, -1, -1))


def _zeta(s: float, q: float) -> float:
    if s == 1:
        return math.inf
    if s < 1:
        return math.nan
    if q <= 0 and (math.isinf(q) or q == math.floor(q)):
        return math.inf
    if math.isnan(s) or math.isnan(q) or (q < 0 and not math.isinf(s) and s != math.floor(s)):
        return math.nan
    if q < 0:
        t = -q - math.floor(-q)
        other = _zeta_positive(s, t) - _zeta_positive(s, 1 - q)
        total = _zeta_positive(s, 1 - t) + (-other if s % 2 == 1 else other)
    else:
        total = _zeta_positive(s, q)
    endless = math.isinf(s) or math.isinf(q)
    return math.nan if endless and total == 0 else total


# ---- the incomplete gamma functions


def _gamma_ends(a: float, x: float, at_zero: float) -> float | None:
    """The value at an end of the domain, None inside."""
    past = 1 - at_zero
    if x < 0 or a < 0:
        return math.nan
    if a == 0:
        return past if x > 0 else math.nan
    if x == 0:
        return at_zero
    if math.isinf(a):
        return math.nan if math.isinf(x) else at_zero
    if math.isinf(x):
        return past
    return math.nan if math.isnan(a) or math.isnan(x) else None


def _gamma_parts(a: float, x: float) -> tuple[float, float]:
    """(lower, upper), the smaller of them to its own relative accuracy."""
    scale = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1 / a
        k = 0
        while term > 1e-17 * total and k < _MOST:
            k += 1
            term *= x / (a + k)
            total += term
        lower = total * math.exp(scale) if scale < 700 else math.inf
        return lower, 1 - lower
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h, change, k = d, 0.0, 0
    while abs(change - 1) > 1e-16 and k < _MOST:
        k += 1
        numerator = -k * (k - a)
        b += 2
        d = 1 / (numerator * d + b)
        c = b + numerator / c
        change = c * d
        h *= change
    upper = h * math.exp(scale)
    return 1 - upper, upper


def _igamma(a: float, x: float) -> float:
    end = _gamma_ends(a, x, 0.0)
    return _gamma_parts(a, x)[0] if end is None else end


def _igammac(a: float, x: float) -> float:
    end = _gamma_ends(a, x, 1.0)
    return _gamma_parts(a, x)[1] if end is None else end


FUNCTIONS: dict[str, Function] = {
    **{name: _polynomial(name) for name in POLYNOMIALS.split()},
    "gcd": lambda a, b: np.gcd(a, b),
    "zeta": _each(_zeta),
    "igamma": _each(_igamma),
    "igammac": _each(_igammac),
}
