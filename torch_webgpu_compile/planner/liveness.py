"""Which intermediates share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..symbolic.sizes import Expr


@dataclass(frozen=True, slots=True)
class Interval:
    """The steps between which a buffer holds a value, both included."""

    name: str
    nbytes: Expr
    first: int
    last: int


def assign_slots(intervals: Sequence[Interval]) -> dict[str, int]:
    """A slot per buffer such that buffers of one slot are never alive in the same step.

    Best fit in order of first use: the smallest free slot that is large enough, else the largest
    free one, which grows. Buffers of symbolic size only take slots of exactly that size.
    """
    sizes: list[Expr] = []
    free: list[int] = []
    alive: list[tuple[int, int]] = []
    slots: dict[str, int] = {}
    for interval in sorted(intervals, key=lambda i: (i.first, i.last, i.name)):
        for ended in [entry for entry in alive if entry[0] < interval.first]:
            alive.remove(ended)
            free.append(ended[1])
        slot = _choose(interval.nbytes, free, sizes)
        if slot is None:
            slot = len(sizes)
            sizes.append(interval.nbytes)
        else:
            free.remove(slot)
            if interval.nbytes.is_constant and sizes[slot].constant < interval.nbytes.constant:
                sizes[slot] = interval.nbytes
        alive.append((interval.last, slot))
        slots[interval.name] = slot
    return slots


def _choose(nbytes: Expr, free: Sequence[int], sizes: Sequence[Expr]) -> int | None:
    if not nbytes.is_constant:
        return next((s for s in free if sizes[s] is nbytes), None)
    fixed = [s for s in free if sizes[s].is_constant]
    large = [s for s in fixed if sizes[s].constant >= nbytes.constant]
    if large:
        return min(large, key=lambda s: sizes[s].constant)
    return max(fixed, key=lambda s: sizes[s].constant, default=None)
