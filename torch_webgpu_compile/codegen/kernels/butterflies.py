"""Fourier transforms of a few numbers in registers, as straight WGSL.

Numbers are ``vec2<f32>``, real and imaginary part. Composite lengths are divided (Cooley-Tukey); an
odd prime adds and subtracts what conjugate roots multiply, which halves the multiplications.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

Emit = Callable[[str], str]
"""Writes a statement that names an expression, and returns the name."""


def butterfly(values: Sequence[str], forward: bool, emit: Emit) -> list[str]:
    """WGSL names of the discrete Fourier transform of r values, r = ``len(values)``.

    Result k is Σ over j of values[j] · exp(∓2πi · jk/r), with a negative sign if ``forward``.
    """
    r = len(values)
    if r == 1:
        return list(values)
    if r == 2:
        a, b = values
        return [emit(f"{a} + {b}"), emit(f"{a} - {b}")]
    first = 4 if r % 4 == 0 and r > 4 else _smallest_prime(r)
    if first == r:
        return _prime(values, forward, emit)
    second = r // first
    parts = [butterfly(values[j::second], forward, emit) for j in range(second)]
    results = [""] * r
    for k in range(first):
        turned = [
            _turned(part[k], Fraction(j * k, r) % 1, forward, emit) for j, part in enumerate(parts)
        ]
        results[k::first] = butterfly(turned, forward, emit)
    return results


def _prime(values: Sequence[str], forward: bool, emit: Emit) -> list[str]:
    r = len(values)
    half = range(1, r // 2 + 1)
    sums = [emit(f"{values[k]} + {values[r - k]}") for k in half]
    differences = [emit(f"{values[k]} - {values[r - k]}") for k in half]
    results = [emit(" + ".join([values[0], *sums]))] + [""] * (r - 1)
    for m in half:
        turns = [Fraction(k * m, r) % 1 for k in half]
        terms = [f"{_cosine(x)} * {name}" for x, name in zip(turns, sums, strict=True)]
        even = emit(" + ".join([values[0], *terms]))
        terms = [f"{_sine(x)} * {name}" for x, name in zip(turns, differences, strict=True)]
        odd = emit(" + ".join(terms))
        below = emit(f"vec2<f32>({even}.x + {odd}.y, {even}.y - {odd}.x)")
        above = emit(f"vec2<f32>({even}.x - {odd}.y, {even}.y + {odd}.x)")
        results[m], results[r - m] = (below, above) if forward else (above, below)
    return results


def _turned(value: str, turn: Fraction, forward: bool, emit: Emit) -> str:
    """``value`` times exp(∓2πi · turn), 0 ≤ turn < 1."""
    quarters = (-turn if forward else turn) % 1 * 4
    if quarters == 0:
        return value
    if quarters == 1:
        return emit(f"vec2<f32>(-{value}.y, {value}.x)")
    if quarters == 2:
        return emit(f"-{value}")
    if quarters == 3:
        return emit(f"vec2<f32>({value}.y, -{value}.x)")
    if quarters.denominator == 2:
        # An odd number of eighths: both parts of the root are ±√½.
        cosine, sine = ("-" if negative else "" for negative in (1 < quarters < 3, quarters > 2))
        minus_sine = "+" if sine else "-"
        return emit(
            f"{_literal(math.sqrt(0.5))} * vec2<f32>({cosine}{value}.x {minus_sine} {value}.y, "
            f"{sine}{value}.x {cosine or '+'} {value}.y)"
        )
    c, s = _cosine(quarters / 4), _sine(quarters / 4)
    return emit(f"vec2<f32>({c} * {value}.x - {s} * {value}.y, {s} * {value}.x + {c} * {value}.y)")


def _smallest_prime(n: int) -> int:
    return next(p for p in range(2, n + 1) if n % p == 0)


def _cosine(turn: Fraction) -> str:
    return _literal(math.cos(2 * math.pi * turn))


def _sine(turn: Fraction) -> str:
    return _literal(math.sin(2 * math.pi * turn))


def _literal(number: float) -> str:
    text = f"{float(np.float32(number))!r}f"
    return f"({text})" if number < 0 else text
