"""`divide`: a plan in sections, between which memory that nothing needs goes back to the pool.

The commands of a call are recorded at once, with memory for all that it computes. A backward plan
reads what a forward one has saved, layer by layer, and computes gradients in the same order: with
sections, those of the last layers take the place of what the last layers had saved.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ..plan.model import Plan
from .buffers import bucket_nbytes
from .sized import MemoryPlace, SizedDispatch, SizedPlan

# A section costs the host some ten microseconds. So there are none for less than this, in bytes and
# as a part of what the call holds, nor for the last part of what all possible sections would save.
_LEAST_NBYTES = 8 << 20
_LEAST_SHARE = 1 / 32
_LEFT_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Section:
    """Steps of a plan that are recorded at once.

    Attributes:
        plan: the steps alone. Its ``places`` are those that no earlier section has.
        released: the buffers, by name, that neither a later section nor the caller needs.
    """

    plan: SizedPlan
    released: tuple[str, ...] = ()


def peak_nbytes(sections: Sequence[Section], kept: frozenset[str]) -> int:
    """The most that a call in these sections takes of the pool for buffers other than ``kept``."""
    live: dict[tuple[str, ...], int] = {}
    most = 0
    for section in sections:
        for place in section.plan.places:
            if kept.isdisjoint(place.names):
                live[place.names] = bucket_nbytes(place.nbytes)
        most = max(most, sum(live.values()))
        released = set(section.released)
        live = {names: n for names, n in live.items() if released.isdisjoint(names)}
    return most


@dataclass(frozen=True, slots=True)
class _Life:
    """The steps, both included, in which a buffer has memory; ``slot`` of an intermediate."""

    name: str
    slot: int | None
    nbytes: int
    first: int
    last: int


def divide(plan: Plan, sized: SizedPlan, given_up: Collection[str]) -> list[Section]:
    """The sections of a plan, in order; only one where more would not lower its peak by much.

    A plan with host steps, or one that changes inputs in place, is not divided: what its launcher
    has to know of the memory of a call, it has to know of all of it.

    Args:
        plan: of which ``sized`` was made.
        given_up: the inputs that the caller has no use for during the call.
    """
    changed = {output.buffer for output in plan.outputs if output.mutates is not None}
    is_changed = any(plan.buffers[name].role == "input" for name in changed if name is not None)
    steps = [step for step in sized.steps if isinstance(step, SizedDispatch)]
    if is_changed or len(steps) < len(sized.steps):
        return [Section(sized)]
    lives = _lives(plan, sized, steps, given_up)
    ends = _ends(lives, len(steps))
    if len(ends) < 2:
        return [Section(sized)]
    starts = [0, *ends[:-1]]
    places, released = _memory(plan, lives, starts)
    return [
        Section(_part(plan, sized, steps[start:end], places[k]), tuple(released[k]))
        for k, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _lives(
    plan: Plan, sized: SizedPlan, steps: Sequence[SizedDispatch], given_up: Collection[str]
) -> list[_Life]:
    """Lifetimes of outputs, intermediates, and the inputs that are given up."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for k, step in enumerate(steps):
        for position in step.buffers:
            first.setdefault(sized.names[position], k)
            last[sized.names[position]] = k
    end = len(steps) - 1
    returned = {output.buffer for output in plan.outputs}
    found = []
    for name, nbytes in zip(sized.names, sized.nbytes, strict=True):
        buffer = plan.buffers[name]
        if buffer.role == "output":
            found.append(_Life(name, None, nbytes, first.get(name, 0), end))
        elif buffer.role == "intermediate":
            found.append(_Life(name, buffer.slot, nbytes, first.get(name, 0), last.get(name, 0)))
        elif buffer.role == "input" and name in given_up and name not in returned:
            found.append(_Life(name, None, nbytes, 0, last.get(name, 0)))
    return found


# ---- where sections end


def _ends(lives: Sequence[_Life], count: int) -> list[int]:
    """The steps before which sections end: as few as keep within what is allowed."""
    if count < 2:
        return [count]
    own = [life for life in lives if life.slot is None]
    begun = _before([(life.first, life.nbytes) for life in own], count)
    ended = _before([(life.last, life.nbytes) for life in own], count)
    members: list[list[_Life]] = [[] for _ in range(count)]
    for life in lives:
        if life.slot is not None:
            members[life.first].append(life)

    def section(start: int, most: float) -> tuple[int, int]:
        """The end of the longest section that holds at most so many bytes, and what it holds."""
        slots: dict[int | None, int] = {}
        held = in_slots = 0
        new = [life for k in range(start + 1) for life in members[k] if life.last >= start]
        for end in range(start, count):
            for life in new if end == start else members[end]:
                grown = max(life.nbytes, slots.get(life.slot, 0))
                in_slots += grown - slots.get(life.slot, 0)
                slots[life.slot] = grown
            now = begun[end + 1] - ended[start] + in_slots
            if end > start and now > most:
                return end, held
            held = now
        return count, held

    _, whole = section(0, math.inf)
    least = max(section(start, 0)[1] for start in range(count))
    if whole - least < max(_LEAST_NBYTES, whole * _LEAST_SHARE):
        return [count]
    allowed = least + (whole - least) * _LEFT_SHARE
    ends: list[int] = []
    while not ends or ends[-1] < count:
        ends.append(section(ends[-1] if ends else 0, allowed)[0])
    return ends


def _before(entries: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Bytes of the entries, (step, nbytes), before each step and before the end."""
    found = [0] * (count + 1)
    for step, nbytes in entries:
        found[step + 1] += nbytes
    return list(accumulate(found))


# ---- what memory each section takes and gives back


def _memory(
    plan: Plan, lives: Sequence[_Life], starts: Sequence[int]
) -> tuple[Mapping[int, list[MemoryPlace]], Mapping[int, list[str]]]:
    """By section: the places to be made before it, and the buffers that are dead after it."""
    places: defaultdict[int, list[MemoryPlace]] = defaultdict(list)
    released: defaultdict[int, list[str]] = defaultdict(list)
    shared: defaultdict[int, list[_Life]] = defaultdict(list)
    final = len(starts) - 1

    def section_of(step: int) -> int:
        return bisect_right(starts, step) - 1

    for life in lives:
        role = plan.buffers[life.name].role
        if life.slot is not None:
            shared[life.slot].append(life)
            continue
        if role != "input":
            places[section_of(life.first)].append(MemoryPlace(life.name, life.nbytes, (life.name,)))
        if role != "output" and section_of(life.last) < final:
            released[section_of(life.last)].append(life.name)
    for slot, members in shared.items():
        for run in _runs(members, section_of):
            names = [life.name for life in run]
            nbytes = max(life.nbytes for life in run)
            places[section_of(run[0].first)].append(MemoryPlace(slot, nbytes, tuple(names)))
            if section_of(run[-1].last) < final:
                released[section_of(run[-1].last)] += names
    return places, released


def _runs(members: Sequence[_Life], section_of: Callable[[int], int]) -> list[list[_Life]]:
    """The buffers of a slot, in groups of those that begin in the section in which one before ends.

    Only these keep its memory from one to the next.
    """
    found: list[list[_Life]] = []
    for life in sorted(members, key=lambda life: life.first):
        if found and section_of(life.first) <= section_of(found[-1][-1].last):
            found[-1].append(life)
        else:
            found.append([life])
    return found


def _part(
    plan: Plan, sized: SizedPlan, steps: Sequence[SizedDispatch], places: Sequence[MemoryPlace]
) -> SizedPlan:
    """Some steps as a plan of the buffers that they need."""
    used = {sized.names[position] for step in steps for position in step.buffers}
    if not used.isdisjoint(plan.prepared) and plan.preparation is not None:
        used.update(plan.prepared)
        used.update(spec.buffer for spec in plan.preparation.inputs if spec.buffer is not None)
    used.update(n for n, buffer in plan.buffers.items() if buffer.role in ("constant", "status"))
    kept = [k for k, name in enumerate(sized.names) if name in used]
    moved = {position: k for k, position in enumerate(kept)}
    return SizedPlan(
        sized.sizes,
        tuple(sized.names[k] for k in kept),
        tuple(sized.nbytes[k] for k in kept),
        tuple(_moved(step, moved) for step in steps),
        tuple(places),
    )


def _moved(step: SizedDispatch, positions: Mapping[int, int]) -> SizedDispatch:
    return replace(
        step,
        buffers=tuple(positions[k] for k in step.buffers),
        conflicts=tuple((positions[a], positions[b]) for a, b in step.conflicts),
    )
