"""Random numbers from a seed and a counter: the seeds of the random operators of a call."""

from __future__ import annotations

WORD = (1 << 64) - 1
"""Seeds are words of 64 bits."""

_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood 2014): a hash of 64 bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & WORD
    return value ^ (value >> 31)


def seed_bytes(seed: int, first: int, count: int) -> bytes:
    """Rows ``first`` to ``first + count`` of what a seed gives: int32 (count, 2), as bytes."""
    # Seeds close to each other, and counters, are spread over all 64 bits before they meet.
    key = _mix(seed * _GOLDEN + 1 & WORD)
    hashes = [_mix(key + row * _GOLDEN & WORD) for row in range(first, first + count)]
    return b"".join([value.to_bytes(8, "little") for value in hashes])
