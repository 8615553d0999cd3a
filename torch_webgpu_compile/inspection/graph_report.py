"""A `Report`'s part for one graph: its dispatches, host calls and the time of compiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import human_bytes
from ..plan.model import Plan
from .memory import Holding, Memory, memory_of
from .traffic import CopyRate, Repetition, Traffic, repetition_of


@dataclass(frozen=True)
class KernelReport:
    """One dispatch of a graph: its kernel, sizes and time.

    Attributes:
        name: the kernel's name; a kernel that is dispatched twice is listed twice.
        kind: its template, e.g. ``matmul``.
        ops: the ATen overloads that it computes.
        wgsl: its source.
        grid: workgroups per dimension.
        bytes_read, bytes_written: the least traffic.
        flops: arithmetic operations.
        sources: the user's lines of code.
        reads, writes: plan buffers.
        traffic: the same bytes by what they are of.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    wgsl: str
    grid: tuple[int, int, int]
    bytes_read: int
    bytes_written: int
    flops: int
    sources: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class HostReport:
    """A call that ran on the CPU."""

    op: str
    source: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class GraphReport:
    """One captured graph.

    Attributes:
        name: e.g. ``graph0_forward``.
        phase: ``inference``, ``forward`` or ``backward``.
        steps: dispatches and host calls of every call, in order.
        preparation: dispatches that run only after parameters have changed.
        texts: readable results of every pass that changed something, by its name.
        plan: what runs.
        seconds: how long each pass of the compiler took, by its name; only ``ir``, which is
            lowering, where the plan came from the cache.
        timed_nbytes, timed_seconds: what its dispatches moved in the call, and how long they took
            by the GPU's timestamps, one after the other; 0 without timestamps.
        holdings: the memory that is needed before or after a call.
        peak_nbytes: the most that a call takes at once besides.
        keeps_peak: whether that is kept for the next call, as for graphs of CPU tensors.
    """

    name: str
    phase: str
    steps: tuple[KernelReport | HostReport, ...]
    texts: Mapping[str, str] = field(repr=False)
    plan: Plan = field(repr=False)
    preparation: tuple[KernelReport | HostReport, ...] = ()
    seconds: Mapping[str, float] = field(repr=False, default_factory=dict)
    timed_nbytes: int = 0
    timed_seconds: float = 0.0
    holdings: tuple[Holding, ...] = field(repr=False, default=())
    peak_nbytes: int = 0
    keeps_peak: bool = False

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """The dispatches of every call."""
        return tuple(step for step in self.steps if isinstance(step, KernelReport))

    @property
    def dispatch_count(self) -> int:
        """Dispatches per call, with an empty grid left out."""
        return sum(0 not in kernel.grid for kernel in self.kernels)

    @property
    def traffic(self) -> Traffic:
        """The least bytes that the dispatches of a call move."""
        return sum((kernel.traffic for kernel in self.kernels), Traffic())

    @property
    def memory(self) -> Memory:
        """The GPU memory that a call needs."""
        return memory_of(self.holdings, self.peak_nbytes)

    @property
    def layers(self) -> Repetition | None:
        """The dispatches that repeat, as a model's equal layers do; None where there are none."""
        kernels = self.kernels
        return repetition_of([k.name for k in kernels], [k.kind for k in kernels])

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The operators that run on the host in every call, one entry for each step."""
        return tuple(step.op for step in self.steps if isinstance(step, HostReport))


def dispatches_of(graph: GraphReport) -> str:
    """How many dispatches a graph has, and how many that are not made in every call."""
    prepared = f", {len(graph.preparation)} more prepare for it" if graph.preparation else ""
    return f"{len(graph.kernels)} dispatches{prepared}"


def times_of(graph: GraphReport) -> str:
    """How long the compiler took, and which of its passes took a twentieth of it or more."""
    total = sum(graph.seconds.values())
    long = [(name, s) for name, s in graph.seconds.items() if s >= total / 20]
    shown = ", ".join(f"{name} {1000 * s:.0f}" for name, s in long)
    return f"  compiled in {1000 * total:.0f} ms: {shown}"


def lines_of(graph: GraphReport, rate: CopyRate | None) -> list[str]:
    """What is said below the table of a graph: its memory, its traffic, and compiling it."""
    return [f"  memory: {graph.memory}", *traffic_lines(graph, rate), times_of(graph)]


def traffic_lines(graph: GraphReport, rate: CopyRate | None) -> list[str]:
    """Lines about the bytes a call moves, their least time by a copy's rate, and its layers."""
    moved = graph.traffic
    lines = [f"  {_moved(moved)}"]
    if rate is not None and moved.nbytes:
        seconds = rate.seconds(moved)
        source = "measured" if rate.measured else "known from doctor --measure"
        copy = f"a copy's {rate.bytes_per_second / 1e9:.4g} GB/s ({source}, {rate.name})"
        lines.append(
            f"  at {copy} that takes {1e3 * seconds:.4g} ms: at most {1 / seconds:.4g} calls/s, "
            "which are tokens/s if a call makes a token"
        )
        if graph.timed_seconds:
            share = graph.timed_nbytes / graph.timed_seconds / rate.bytes_per_second
            lines.append(
                f"  in this first call dispatches took {1e3 * graph.timed_seconds:.4g} ms by the "
                f"GPU's clock: {share:.0%} of that rate"
            )
    layers = graph.layers
    if layers is not None:
        part = graph.kernels[layers.first : layers.first + layers.length]
        besides = len(graph.kernels) - layers.alike * layers.length
        lines.append(
            f"  {layers.alike} layers of {layers.length} dispatches ({layers.times} are equal), "
            f"{besides} besides; a layer {_moved(sum((k.traffic for k in part), Traffic()))}"
        )
    return lines


def _moved(traffic: Traffic) -> str:
    read = (
        (traffic.weights, "weights"),
        (traffic.state, "what it changes (a cache)"),
        (traffic.other, "the rest"),
    )
    parts = ", ".join(f"{human_bytes(nbytes)} of {what}" for nbytes, what in read if nbytes)
    return f"reads {parts or 'nothing'}, writes {human_bytes(traffic.written)}"


def numbered_steps(graph: GraphReport) -> list[tuple[int, str, KernelReport | HostReport]]:
    """The steps of a graph and those of its preparation: (number, mark, step).

    The mark is "(once) " for steps of the preparation, else "".
    """
    steps = (*graph.steps, *graph.preparation)
    return [(k, "" if k < len(graph.steps) else "(once) ", step) for k, step in enumerate(steps)]


HEADS = ("kernel", "grid", "read", "written", "flops", "ops", "from")
"""Of columns about dispatches."""


def cells_of(step: KernelReport | HostReport, mark: str) -> tuple[str, ...]:
    """What is under `HEADS` of a step."""
    if isinstance(step, HostReport):
        return "(host)", "", "", "", "", step.op, short_source(step.source)
    return (
        mark + step.name,
        "×".join(map(str, step.grid)),
        human_bytes(step.bytes_read),
        human_bytes(step.bytes_written),
        human_count(step.flops),
        " ".join(step.ops),
        short_source(step.sources[-1]) if step.sources else "",
    )


def short_source(source: str) -> str:
    """``file:line: code`` with the file's name only."""
    path, separator, rest = source.partition(":")
    return f"{Path(path).name}{separator}{rest}"


def clip(text: str, length: int) -> str:
    """The text, of at most so many characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def human_count(count: int) -> str:
    """A count for people, e.g. ``2.1 G``."""
    value, unit = float(count), ""
    for larger in (" k", " M", " G", " T"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
