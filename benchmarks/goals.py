"""Goals as data, and whether a measurement reaches them.

A goal names what it compares; `judge` reads it out of the results of one case, which are figures by
system (see `systems`). Nothing here measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Results = Mapping[str, Mapping[str, Any]]
Clock = Literal["kernel", "stream", "host"]

# Two systems that compute the same differ by rounding. What differs by more is not the same,
# however fast it is.
_LARGEST_DIFFERENCE = 1e-2
# Of a stream's time, the host's: above this share of it, the GPU waits for the host.
_HOST_DECIDES = 0.8
OURS = "webgpu"
_INDUCTOR = "inductor"
OWN = (OURS, "wgpu", "wgpudawn")


@dataclass(frozen=True, slots=True)
class Faster:
    """At least ``factor`` × as fast as the system ``than``.

    Attributes:
        label: what to call the other system.
        clock: ``kernel`` compares the least of GPU clock and steady stream, on both sides;
            ``stream`` the steady stream alone, with what the host costs; ``host`` what the host
            spends in a call.
    """

    than: str
    factor: float
    label: str
    clock: Clock = "kernel"
    needs_cuda: bool = True


@dataclass(frozen=True, slots=True)
class AsFast:
    """A stream of calls takes at most ``gpu`` × the time of the system ``than`` where that is its
    GPU's time, and ``host`` × where it is its host's.
    """

    than: str
    label: str
    gpu: float
    host: float


@dataclass(frozen=True, slots=True)
class SameBits:
    """The same results as of the system ``than``, bit by bit."""

    than: str
    label: str


@dataclass(frozen=True, slots=True)
class CopyShare:
    """The bytes that any implementation must move, at this share of CUDA's copy bandwidth."""

    share: float


@dataclass(frozen=True, slots=True)
class FlopRate:
    """At least this many floating-point operations per second."""

    flops_per_second: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """A figure of a system is at most ``limit``; ``unit`` is "" for counts, or s or µs."""

    field: str
    limit: float
    unit: str = ""
    what: str = ""
    system: str = OURS


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A figure of a system is at least ``limit``, in ``unit``."""

    field: str
    limit: float
    unit: str
    system: str = OURS


@dataclass(frozen=True, slots=True)
class AtMostShare:
    """A figure of a system is at most ``limit`` × that of Inductor on CUDA."""

    field: str
    limit: float
    what: str
    system: str = OURS


@dataclass(frozen=True, slots=True)
class Leaner:
    """At most ``factor`` × the peak GPU memory of another system."""

    than: str
    factor: float
    label: str


Goal = Faster | AsFast | SameBits | CopyShare | FlopRate | AtMost | AtMostShare | AtLeast | Leaner


@dataclass(frozen=True, slots=True)
class Work:
    """What a case must do at least. ``nbytes`` 0: its weights count, if it has any."""

    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal next to what was measured.

    Attributes:
        value: as in ``measured``; None without a measurement.
        share: of the goal; 1 and more reach it. None without a measurement.
        reached: None when this machine cannot tell.
        note: why there is no answer, or what else to know.
    """

    goal: str
    measured: str = "–"
    value: float | None = None
    share: float | None = None
    reached: bool | None = None
    note: str = ""


def systems_of(goal: Goal) -> frozenset[str]:
    """The systems that have to be measured for it."""
    match goal:
        case Faster(than=than) | AsFast(than=than) | SameBits(than=than) | Leaner(than=than):
            return frozenset({OURS, than})
        case AtMost(system=system) | AtLeast(system=system):
            return frozenset({system})
        case AtMostShare(system=system):
            return frozenset({system, _INDUCTOR})
        case CopyShare() | FlopRate():
            return frozenset({OURS})


def needs_limits(goal: Goal) -> bool:
    """Whether the machine's copy bandwidth has to be measured for it."""
    return isinstance(goal, CopyShare)


def is_count(goal: Goal) -> bool:
    """Whether it means the same for small sizes and on a slow adapter."""
    return isinstance(goal, SameBits) or (isinstance(goal, AtMost) and not goal.unit)


def describe(goal: Goal) -> str:
    """For a table."""
    match goal:
        case Faster(factor=factor, label=label):
            return f"≥ {factor:.3g} × {label}"
        case AsFast(label=label, gpu=gpu, host=host):
            return f"≤ {gpu:g} × {label}'s GPU, ≤ {host:g} × its host"
        case SameBits(label=label):
            return f"the bits of {label}"
        case CopyShare(share=share):
            return f"≥ {share:.0%} of copy bandwidth"
        case FlopRate(flops_per_second=rate):
            return f"≥ {rate / 1e12:g} TFLOP/s"
        case AtMost(limit=limit, unit=unit, what=what):
            return f"≤ {limit:g}{unit and ' ' + unit} {what}".rstrip()
        case AtMostShare(limit=limit, what=what):
            return f"≤ {limit:g} × Inductor, {what}"
        case AtLeast(limit=limit, unit=unit):
            return f"≥ {limit:g} {unit}"
        case Leaner(factor=factor, label=label):
            return f"≤ {factor:g} × peak memory of {label}"


def kernel_seconds(result: Mapping[str, Any]) -> float:
    """The GPU's time. Each figure is an upper bound of it: timestamps add a pass per dispatch,
    and a stream of calls adds the gaps between them."""
    return float(min(result["seconds"], result.get("gpu_s") or math.inf))


def judge(
    goal: Goal, results: Results, limits: Mapping[str, float], work: Work, has_cuda: bool
) -> Verdict:
    """``limits``: as `limits.measure` gives them. Peers are CUDA's: without it there is no answer,
    but the ratio to what there is."""
    text = describe(goal)
    for system in sorted(systems_of(goal)):
        found = results.get(system)
        if not found:
            return Verdict(text, note=f"{system} was not measured")
        if "error" in found:
            # What is not installed says nothing about the goal; what failed here does.
            reached = False if system in OWN and not found.get("missing") else None
            return Verdict(text, note=f"{system}: {found['error']}", reached=reached)
    for system in sorted(systems_of(goal) | {OURS}):
        difference = results.get(system, {}).get("relative_difference", 0.0)
        if not difference <= _LARGEST_DIFFERENCE:  # NaN too
            note = f"wrong result: it differs by {difference:.1e}"
            return Verdict(text, note=note, reached=False)
    is_peer_here = has_cuda or not _needs_cuda(goal)
    try:
        value, share, measured = _measure(goal, results, limits, work)
    except KeyError as error:
        note = f"{error.args[0]} was not measured" if is_peer_here else "no CUDA"
        return Verdict(text, note=note)
    reached = share >= 1 if is_peer_here else None
    return Verdict(text, measured, value, share, reached, "" if is_peer_here else "no CUDA")


def judge_all(
    goals: Iterable[Goal],
    results: Results,
    limits: Mapping[str, float],
    work: Work,
    has_cuda: bool,
    is_real: bool,
) -> list[Verdict]:
    """`judge` for each goal.

    Args:
        is_real: whether sizes and GPU are those that goals mean: else nothing is reached or missed.
    """
    found = {goal: judge(goal, results, limits, work, has_cuda) for goal in goals}
    return [
        verdict if is_real or isinstance(goal, SameBits) else replace(verdict, reached=None)
        for goal, verdict in found.items()
    ]


def _seconds(result: Mapping[str, Any], clock: Clock) -> float:
    match clock:
        case "kernel":
            return kernel_seconds(result)
        case "stream":
            return float(result["seconds"])
        case "host":
            return float(result["host_s"])


def _needs_cuda(goal: Goal) -> bool:
    match goal:
        case Faster(needs_cuda=needed):
            return needed
        case AsFast() | CopyShare() | AtMostShare() | Leaner():
            return True
        case SameBits() | FlopRate() | AtMost() | AtLeast():
            return False


def _measure(
    goal: Goal, results: Results, limits: Mapping[str, float], work: Work
) -> tuple[float, float, str]:
    """(value, share of the goal, the value for a person); KeyError names a missing figure."""
    match goal:
        case Faster(than=than, factor=factor, clock=clock):
            times = [_seconds(result, clock) for result in (results[than], results[OURS])]
            ratio = times[0] / times[1]
            return ratio, ratio / factor, f"{ratio:.2f} ×"
        case AsFast(than=than, gpu=gpu, host=host):
            theirs, ours = results[than], results[OURS]
            by_host = theirs["host_s"] >= _HOST_DECIDES * theirs["seconds"]
            ratio = ours["seconds"] / theirs["seconds"]
            which = "host" if by_host else "GPU"
            return ratio, (host if by_host else gpu) / ratio, f"{ratio:.2f} × its {which}"
        case SameBits(than=than):
            same = results[OURS]["bits"] == results[than]["bits"]
            return float(same), float(same), "the same" if same else "others"
        case CopyShare(share=wanted):
            ours = results[OURS]
            nbytes = work.nbytes or ours["weights_nbytes"]
            share = nbytes / kernel_seconds(ours) / limits["copy_bytes_per_second"]
            return share, share / wanted, f"{share:.1%}"
        case FlopRate(flops_per_second=wanted):
            rate = work.flops / kernel_seconds(results[OURS])
            return rate, rate / wanted, f"{rate / 1e12:.4g} TFLOP/s"
        case AtMost(field=field, limit=limit, unit=unit, system=system):
            value = results[system][field] * (1e6 if unit == "µs" else 1)
            return value, limit / max(value, 1e-12), f"{value:.4g}{unit and ' ' + unit}"
        case AtMostShare(field=field, limit=limit, system=system):
            ratio = results[system][field] / results[_INDUCTOR][field]
            return ratio, limit / ratio, f"{ratio:.2f} ×"
        case AtLeast(field=field, limit=limit, unit=unit, system=system):
            value = results[system][field]
            return value, value / limit, f"{value:.4g} {unit}"
        case Leaner(than=than, factor=factor):
            ratio = results[OURS]["gpu_nbytes"] / results[than]["gpu_nbytes"]
            return ratio, factor / ratio, f"{ratio:.2f} ×"
