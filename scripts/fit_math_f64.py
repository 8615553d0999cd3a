"""Prints the coefficients of `templates/math*.wgsl.jinja` and of lowerings, with each fit's error.

Every function is interpolated at Chebyshev nodes with 80 digits, which is within a factor of two of
the best polynomial. The error is log2 of the largest difference in the function itself, with the
coefficients rounded to float64. Lowest power first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp

mp.mp.dps = 80
Function = Callable[[Any], Any]


def fit(f: Function, low: Any, high: Any, count: int, weight: Function) -> tuple[list[float], Any]:
    """``count`` coefficients of ``f`` on [low, high], and the error times ``weight``."""
    middle, half = (mp.mpf(low) + high) / 2, (mp.mpf(high) - low) / 2
    nodes = [middle + half * mp.cos(mp.pi * (2 * k + 1) / (2 * count)) for k in range(count)]
    powers = mp.matrix(count, count)
    for row, x in enumerate(nodes):
        for power in range(count):
            powers[row, power] = x**power
    solved = mp.lu_solve(powers, mp.matrix([f(x) for x in nodes]))
    rounded = [float(c) for c in solved]
    worst = mp.mpf(0)
    for k in range(1, 500):
        x = low + (high - low) * mp.mpf(k) / 500
        value = mp.polyval([mp.mpf(c) for c in reversed(rounded)], x)
        worst = max(worst, abs(value - f(x)) * weight(x))
    return rounded, mp.log(worst, 2)


def _of_root(f: Function) -> Function:
    """``f`` of a square as a function of the square."""
    return lambda z: f(mp.sqrt(z))


def _atanh_rest(s: Any) -> Any:
    return (2 * mp.atanh(s) - 2 * s) / s**3


_LOG_END = ((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)) ** 2 * mp.mpf("1.001")
_EIGHTH_TURN = (mp.pi / 4) ** 2 * mp.mpf("1.001")
_TINY = mp.mpf("1e-9")


def _erfcx_fit(t: Any) -> Any:
    x = 3 * (1 + t) / (1 - t)
    return (1 + 2 * x) * mp.exp(x * x) * mp.erfc(x)


def _lgamma_fit(t: Any) -> Any:
    return mp.loggamma(1 + t) / (t * (t - 1))


def _erfinv_fit(t: Any) -> Any:
    y = mp.sqrt(-mp.expm1(-(t + mp.mpf("2.5"))))
    return mp.erfinv(y) / y


FITS: dict[str, tuple[Function, Any, Any, int, Function]] = {
    "exp: (e^r - 1 - r - r²/2) / r³": (
        lambda r: (mp.expm1(r) - r - r * r / 2) / r**3,
        -mp.mpf("0.35"),
        mp.mpf("0.3501"),  # no node at 0
        10,
        lambda r: abs(r) ** 3,
    ),
    "log: (2 atanh s - 2s) / s³": (
        _of_root(_atanh_rest),
        _TINY,
        _LOG_END,
        8,
        lambda z: z,
    ),
    "log for pow: ((2 atanh s - 2s) / s³ - 2/3) / s²": (
        _of_root(lambda s: (_atanh_rest(s) - mp.mpf(2) / 3) / s**2),
        mp.mpf("1e-5"),
        _LOG_END,
        8,
        lambda z: z * z,
    ),
    "sin: (sin r - r) / r³": (
        _of_root(lambda r: (mp.sin(r) - r) / r**3),
        _TINY,
        _EIGHTH_TURN,
        7,
        lambda z: z,
    ),
    "cos: (cos r - 1 + r²/2) / r⁴": (
        _of_root(lambda r: (mp.cos(r) - 1 + r * r / 2) / r**4),
        _TINY,
        _EIGHTH_TURN,
        6,
        lambda z: z * z,
    ),
    "atan: (atan t - t) / t³": (
        _of_root(lambda t: (mp.atan(t) - t) / t**3),
        _TINY,
        mp.mpf(7) / 16 * mp.mpf(7) / 16,
        12,
        lambda z: z,
    ),
    "asin: (asin x - x) / x³": (
        _of_root(lambda x: (mp.asin(x) - x) / x**3),
        _TINY,
        mp.mpf("0.25"),
        14,
        lambda z: z,
    ),
    "erf: erf x / x - 1": (
        _of_root(lambda x: mp.erf(x) / x - 1),
        _TINY,
        mp.mpf("0.5625"),
        12,
        lambda z: 1,
    ),
    "erfc: (1 + 2x) e^(x²) erfc x, of (x - 3) / (x + 3)": (
        _erfcx_fit,
        mp.mpf("-0.6"),
        mp.mpf(25) / 31,
        22,
        lambda t: 1,
    ),
    "f32 atan: (atan t - t) / t³": (
        _of_root(lambda t: (mp.atan(t) - t) / t**3),
        _TINY,
        mp.mpf("1.0001"),
        9,
        lambda z: z,
    ),
    "f32 lgamma: log Γ(1 + t) / (t (t - 1))": (
        _lgamma_fit,
        mp.mpf("-0.31"),
        mp.mpf("1.31"),
        13,
        lambda t: 1,
    ),
    "f32 igamma: log Γ(1 + a) / a": (
        lambda a: mp.loggamma(1 + a) / a,
        _TINY,
        mp.mpf("1.26"),
        11,
        lambda a: 1,
    ),
    "f32 erfinv: erfinv y / y of -log(1 - y²) - 2.5": (
        _erfinv_fit,
        mp.mpf("-2.499999"),
        mp.mpf("2.5"),
        11,
        lambda t: 1,
    ),
}


def two_over_pi(words: int) -> list[int]:
    """The bits of 2/π after the point in words of 32, most significant first."""
    with mp.workdps(words * 10 + 50):
        whole = int(mp.floor(2 / mp.pi * mp.mpf(2) ** (32 * words)))
    return [(whole >> (32 * (words - 1 - k))) & 0xFFFFFFFF for k in range(words)]


def main() -> None:
    """Prints every fit."""
    for name, (f, low, high, count, weight) in FITS.items():
        coefficients, error = fit(f, low, high, count, weight)
        print(f"{name}   2^{mp.nstr(error, 4)}")
        print("  " + ", ".join(map(repr, coefficients)))
    print("2/π:", ", ".join(f"{w:#010x}u" for w in two_over_pi(40)))
    for name, value in (("ln 2", mp.log(2)), ("π/2", mp.pi / 2), ("1 / ln 2", 1 / mp.log(2))):
        high = mp.mpf(float(value))
        print(name, float(high), float(value - high))


if __name__ == "__main__":
    main()
