"""Where the time of a first call goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..stages import Sums

_RENDERING = "wgsl"


@dataclass(frozen=True)
class CompileTime:
    """Seconds of a first call. ``str(compile_time)`` is a summary.

    They are by the wall's clock, and follow each other in the calling thread, but for
    ``pipelines``.

    Attributes:
        total: the whole call, with opening the GPU.
        device: opening the GPU.
        dynamo: tracing Python.
        aot_autograd: tracing Dynamo's graphs, without this package's passes.
        passes: of this package, by name, over all graphs, with the verification of results.
        rendering: printing WGSL.
        waiting: for pipelines.
        setup: what else the backend does, such as allocating memory.
        rest: uploads, the dispatches themselves, and what else there is.
        pipelines: compiling WGSL, by the name of the kernel. Several threads do so at once: these
            are sums over them, which may be larger than ``waiting``, or than ``total``. A kernel
            that was compiled before in this process is not there.
    """

    total: float = 0.0
    device: float = 0.0
    dynamo: float = 0.0
    aot_autograd: float = 0.0
    passes: Mapping[str, float] = field(default_factory=dict)
    rendering: float = 0.0
    waiting: float = 0.0
    setup: float = 0.0
    pipelines: Mapping[str, float] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """What is in none of the others."""
        return max(0.0, self.total - sum(seconds for _, seconds in self._parts))

    @property
    def _parts(self) -> tuple[tuple[str, float], ...]:
        return (
            ("opening the GPU", self.device),
            ("Dynamo", self.dynamo),
            ("AOTAutograd", self.aot_autograd),
            ("passes", sum(self.passes.values())),
            ("rendering", self.rendering),
            ("waiting for pipelines", self.waiting),
            ("setup", self.setup),
        )

    @property
    def lines(self) -> list[str]:
        """Lines of text: the parts, then which passes and which pipelines took longest."""
        parts = ", ".join(f"{what} {s:.2f}" for what, s in (*self._parts, ("the rest", self.rest)))
        lines = [f"the first call took {self.total:.2f} s: {parts}"]
        if self.passes:
            lines.append(f"  passes: {_longest(self.passes)}")
        if self.pipelines:
            count, total = len(self.pipelines), sum(self.pipelines.values())
            what = f"  pipelines of {count} kernels, {total:.2f} s summed over threads"
            lines.append(f"{what}: {_longest(self.pipelines)}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines)


def compile_time_of(sums: Sums, total: float) -> CompileTime:
    """What was told of a call that took ``total`` seconds."""
    own = sums.own_seconds
    passes = sums.own("pass")
    rendering = passes.pop(_RENDERING, 0.0)
    return CompileTime(
        total,
        own["device", ""],
        own["dynamo", ""],
        own["autograd", ""],
        passes,
        rendering,
        sums.seconds["wait", ""],
        own["backend", ""] + own["executor", ""],
        sums.own("pipeline"),
    )


def _longest(seconds: Mapping[str, float], most: int = 8) -> str:
    shown = sorted(seconds.items(), key=lambda entry: -entry[1])
    named = ", ".join(f"{name} {s:.2f}" for name, s in shown[:most])
    if len(shown) <= most:
        return named
    left = sum(s for _, s in shown[most:])
    return f"{named}, {len(shown) - most} others {left:.2f}"
