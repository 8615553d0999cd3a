"""The least memory traffic of a call's dispatches, and how they repeat: a bound of its time.

Memory bounds a language model's token: each of its weights and each key and value of its cache is
read once. What a call moves, at the rate of a copy, is the least time that it can take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, fields

from ..plan.model import STATUS, Dispatch, Plan
from ..symbolic.sizes import Expr


@dataclass(frozen=True)
class Traffic:
    """Bytes between a GPU's memory and its processors, when each dispatch moves its data once.

    Attributes:
        weights: read of parameters and buffers that the call leaves as they are, of constants, and
            of what is prepared from them.
        state: read of arguments that the call changes, as of a cache: of one that is filled up to a
            position, all of it is counted, although kernels may stop there.
        other: read of other arguments and of what the call itself computed.
        written: in all.
    """

    weights: int = 0
    state: int = 0
    other: int = 0
    written: int = 0

    @property
    def nbytes(self) -> int:
        """Read and written together."""
        return self.weights + self.state + self.other + self.written

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(Traffic)))


@dataclass(frozen=True)
class CopyRate:
    """Bytes per second, read and written, of a copy on a GPU.

    Attributes:
        name: of the GPU.
        measured: now; else stored by ``doctor --measure``.
    """

    bytes_per_second: float
    name: str
    measured: bool

    def seconds(self, traffic: Traffic) -> float:
        """The least time in which so much is moved."""
        return traffic.nbytes / self.bytes_per_second


@dataclass(frozen=True)
class Repetition:
    """A run of equal parts, one after the other, as layers are.

    Attributes:
        first, length: the steps first … first + length - 1 are one of them.
        times: how many are equal.
        alike: how many there are with those before and after that have steps of the same kinds,
            and perhaps another one in between: the first and the last layer share kernels with what
            is beside them.
    """

    first: int
    length: int
    times: int
    alike: int


def traffic_of(
    plan: Plan, step: Dispatch, static: Collection[int], number: Callable[[Expr], int]
) -> Traffic:
    """The memory traffic of one dispatch.

    Args:
        static: positions of the plan's inputs that are parameters and buffers of modules.
        number: the value of an expression of sizes.
    """
    inputs = [entry.buffer for entry in plan.inputs]
    changed = {inputs[out.mutates] for out in plan.outputs if out.mutates is not None}
    kept = {inputs[position] for position in static}
    total = Traffic()
    for binding, (read, written) in zip(step.bindings, step.traffic, strict=False):
        name = binding.buffer
        if name == STATUS:
            continue
        nbytes = number(read)
        if name in changed:
            kind = "state"
        elif name in kept or plan.buffers[name].role in ("constant", "prepared"):
            kind = "weights"
        else:
            kind = "other"
        total += Traffic(**{kind: nbytes}, written=number(written))
    return total


def repetition_of(steps: Sequence[Hashable], kinds: Sequence[Hashable]) -> Repetition | None:
    """The run of equal parts that covers most of a sequence; of several the one of shortest parts.

    None if nothing is repeated, or only one step is: a layer is more than that.

    Args:
        steps: equal where steps do the same.
        kinds: of the same steps; equal where they do something alike.
    """
    best, covered = (0, 0, 0), 0
    for length in range(2, len(steps) // 2 + 1):
        start = 0
        for k in range(len(steps) - length + 1):
            if k < len(steps) - length and steps[k] == steps[k + length]:
                continue
            times = (k - start) // length + 1
            if times > 1 and length * times > covered and len(set(steps[start:k])) > 1:
                best, covered = (start, length, times), length * times
            start = k + 1
    if not covered:
        return None
    first, length, times = best
    part = list(kinds[first : first + length])
    before = _following(kinds[:first][::-1], part[::-1])
    after = _following(kinds[first + covered :], part)
    return Repetition(first, length, times, times + (before + after) // length)


def _following(kinds: Sequence[Hashable], part: Sequence[Hashable]) -> int:
    """How many kinds go on as a repeated part does, where one at a time may come in between."""
    found = at = 0
    while at < len(kinds):
        expected = part[found % len(part)]
        if kinds[at] != expected:
            at += 1
            if at == len(kinds) or kinds[at] != expected:
                break
        found, at = found + 1, at + 1
    return found
