"""Lengths of Fourier transforms: the stages of one kernel, and tables of roots for it.

A transform of length n = r0 · r1 · … is a stage per radix (Stockham's order, in which no stage
permutes). With s the product of the radices before, stage r takes for every b < n/r the elements
b + q · n/r, multiplies them by exp(∓2πi · q · (b mod s) / (s·r)), transforms them, and puts result
q at (b - b mod s) · r + b mod s + q · s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..target import Target

Table = npt.NDArray[np.float32]

# Radices are transformed in registers: two of them for each element.
LARGEST_COMPOSITE = 16
LARGEST_PRIME = 31
_PAIR_NBYTES = 8
# An invocation keeps at most this many elements between two stages.
MOST_KEPT = 32
_STAGES_OF_LONGEST = 3


def longest_row(target: Target, rows: int = 1) -> int:
    """The longest transform of which a workgroup holds ``rows`` in its memory."""
    in_memory = target.max_workgroup_nbytes // (_PAIR_NBYTES * rows)
    return min(in_memory, MOST_KEPT * target.workgroup_invocations // rows)


def has_radices(n: int) -> bool:
    """Whether n ≥ 2 has no prime factor that is too large for a radix."""
    return n > 1 and _largest_prime(n) <= LARGEST_PRIME


@lru_cache(maxsize=4096)
def choose_radices(n: int) -> tuple[int, ...]:
    """The fewest stages, and of these the least arithmetic; the largest radix first.

    The first stage needs no roots. A row is read from memory by n / radix invocations: by several,
    so that neighbours read neighbours, where there is a choice.
    """
    assert has_radices(n), n
    alone = n <= 8 or _largest_prime(n) == n
    found = (n,) if alone else _fewest(n, n)
    return tuple(sorted(found, reverse=True))


@lru_cache(maxsize=1 << 16)
def _fewest(left: int, n: int) -> tuple[int, ...]:
    if left == 1:
        return ()
    choices = [
        (radix, *_fewest(left // radix, n))
        for radix in range(2, LARGEST_PRIME + 1)
        if left % radix == 0
        and (radix <= LARGEST_COMPOSITE or _largest_prime(radix) == radix)
        and (radix <= 8 or n // radix >= 4 or _largest_prime(radix) == radix)
    ]
    return min(choices, key=lambda radices: (len(radices), sum(radices)))


@lru_cache(maxsize=1 << 14)
def _largest_prime(n: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= n:
        if n % factor == 0:
            n, largest = n // factor, factor
        else:
            factor += 1
    return max(n, largest)


def divide(n: int, longest: int) -> int:
    """A divisor of n for a transform in several passes, the first of them of this length.

    There are as few passes as there can be with lengths up to ``longest``, about equally long.
    """
    passes = 2
    while longest**passes < n:
        passes += 1
    divisors = [d for d in range(2, longest + 1) if n % d == 0]
    wanted = n ** (1 / passes)
    enough = [d for d in divisors if n // d <= longest ** (passes - 1)]
    return min(enough or divisors, key=lambda d: abs(d - wanted))


def padded_length(n: int, longest: int) -> int:
    """A length of at least 2n - 1 that is quick to transform (see `chirp`)."""
    least = 2 * n - 1
    candidates = []
    for odd in (1, 3, 5, 9, 15, 25, 27, 45):
        length = odd
        while length < least or length < 2:
            length *= 2
        stages = len(choose_radices(length)) if length <= longest else 2 * _STAGES_OF_LONGEST
        candidates.append((stages * length, length))
    return min(candidates)[1]


def roots(numerators: Any, denominator: int, forward: bool) -> Table:
    """exp(∓2πi · numerator/denominator) as float32 pairs, shape (…, 2).

    Numerators are taken modulo the denominator as integers, the rest is in float64.
    """
    turns = np.asarray(numerators, np.int64) % denominator / denominator
    angles = (-2 if forward else 2) * np.pi * turns
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def stage_roots(radices: Sequence[int], forward: bool) -> Table:
    """The roots of all stages but the first, in order: for q = 1, 2, … those of all b mod s."""
    tables, before = [], radices[0]
    for radix in radices[1:]:
        q, b = np.arange(1, radix)[:, None], np.arange(before)
        tables.append(roots(q * b, before * radix, forward).reshape(-1, 2))
        before *= radix
    return np.concatenate(tables)


def chirp(n: int, forward: bool) -> Table:
    """exp(∓πi · k²/n) for k < n, shape (n, 2).

    With c this chirp, jk = (j² + k² - (k - j)²) / 2 makes a transform of any length n a
    convolution (Bluestein): X[k] = c[k] · Σ over j of (c[j] · x[j]) · conj(c)[k - j].
    """
    k = np.arange(n, dtype=np.int64)
    return roots(k * k, 2 * n, forward)


def chirp_spectrum(n: int, padded: int, forward: bool) -> Table:
    """The forward transform of conj(c), by which that of c · x is multiplied, over ``padded``."""
    k = np.arange(n, dtype=np.int64)
    angles = (2 if forward else -2) * np.pi * (k * k % (2 * n) / (2 * n))
    wrapped = np.zeros(padded, np.complex128)
    wrapped[:n] = np.exp(1j * angles)
    wrapped[padded - n + 1 :] = wrapped[1:n][::-1]
    spectrum = np.fft.fft(wrapped) / padded
    return np.stack([spectrum.real, spectrum.imag], -1).astype(np.float32)
