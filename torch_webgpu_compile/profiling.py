"""`profile`: when each kernel ran and how close it came to what the GPU can do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from .backend import device_for
from .options import resolve
from .runtime import limits
from .runtime.device import Device, opened_devices
from .runtime.interface import Span
from .runtime.queue import Recording
from .sizes import evaluate


@dataclass(frozen=True)
class KernelRun:
    """One dispatch.

    Attributes:
        name, kind, ops, sources: of the kernel; see `plan.model.Kernel`.
        plan: of the compiled graph or operator that it belongs to.
        device: the GPU's number among those in the profile.
        start: seconds of that GPU's clock.
        seconds: its duration.
        nbytes: the least traffic, bytes read and written.
        flops: arithmetic operations.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    sources: tuple[str, ...]
    plan: str
    device: int
    start: float
    seconds: float
    nbytes: int
    flops: int


@dataclass(frozen=True)
class KernelTotal:
    """All dispatches of one kernel of one plan: sums."""

    name: str
    plan: str
    calls: int
    seconds: float
    nbytes: int
    flops: int
    source: str

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0


class Profile:
    """What `profile` saw. Printing it gives a table.

    Attributes:
        runs: every dispatch, in order.
        limits: what each GPU reaches at best, measured before.
        names: of the GPUs.
    """

    def __init__(self, devices: list[Device]) -> None:
        self.runs: list[KernelRun] = []
        self.limits = [limits.measure(device) for device in devices]
        self.names = [device.info.name for device in devices]

    @property
    def kernels(self) -> list[KernelTotal]:
        """By kernel, the slowest first."""
        groups: dict[tuple[str, str], list[KernelRun]] = {}
        for run in self.runs:
            groups.setdefault((run.plan, run.name), []).append(run)
        totals = [
            KernelTotal(
                name,
                plan,
                len(runs),
                sum(run.seconds for run in runs),
                sum(run.nbytes for run in runs),
                sum(run.flops for run in runs),
                next((source for run in runs for source in run.sources), ""),
            )
            for (plan, name), runs in groups.items()
        ]
        return sorted(totals, key=lambda total: -total.seconds)

    @property
    def seconds(self) -> float:
        """Of all dispatches."""
        return sum(run.seconds for run in self.runs)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``."""
        first = min((run.start for run in self.runs), default=0.0)
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": k, "args": {"name": name}}
            for k, name in enumerate(self.names)
        ]
        for run in self.runs:
            details = {
                "plan": run.plan,
                "ops": list(run.ops),
                "source": list(run.sources),
                "GB/s": run.nbytes / max(run.seconds, 1e-12) / 1e9,
                "GFLOP/s": run.flops / max(run.seconds, 1e-12) / 1e9,
            }
            events.append(
                {
                    "ph": "X",
                    "name": run.name,
                    "cat": run.kind,
                    "pid": run.device,
                    "tid": 0,
                    "ts": (run.start - first) * 1e6,
                    "dur": run.seconds * 1e6,
                    "args": details,
                }
            )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def __str__(self) -> str:
        lines = [
            f"{name}: a copy reaches {found.bytes_per_second / 1e9:.4g} GB/s, "
            f"f32 arithmetic {found.flops_per_second / 1e12:.3g} TFLOP/s"
            for name, found in zip(self.names, self.limits, strict=True)
        ]
        heads = ("calls", "total ms", "share", "mean µs", "GB/s", "of copy", "TFLOP/s", "of peak")
        lines += ["", f"{'kernel':44}" + "".join(f"{head:>10}" for head in heads) + "  source"]
        best = max(self.limits, key=lambda found: found.bytes_per_second)
        for total in self.kernels:
            cells = (
                str(total.calls),
                f"{total.seconds * 1e3:.3f}",
                f"{total.seconds / max(self.seconds, 1e-12):.1%}",
                f"{total.seconds / total.calls * 1e6:.1f}",
                f"{total.bytes_per_second / 1e9:.4g}",
                f"{total.bytes_per_second / best.bytes_per_second:.0%}",
                f"{total.flops_per_second / 1e12:.3g}",
                f"{total.flops_per_second / best.flops_per_second:.0%}",
            )
            row = "".join(f"{cell:>10}" for cell in cells)
            lines.append(f"{total.name[:43]:44}{row}  {total.source}")
        lines.append(f"{'all':44}{len(self.runs):>10}{self.seconds * 1e3:>10.3f}")
        return "\n".join(lines)


@contextmanager
def profile() -> Iterator[Profile]:
    """Times every kernel that runs in the context, of compiled models and of ``webgpu`` tensors.

        with torch_webgpu_compile.profile() as profile:
            model(x)
        print(profile)
        profile.save_trace("trace.json")

    Kernels run one at a time, so the whole takes longer than usual, and the gaps between kernels
    mean nothing. Times come from timestamp queries; on a device without them from the host's clock,
    which adds the time of a submit. The first call of a compiled model also compiles it: call it
    once before.

    Raises:
        AdapterError: there is no GPU.
        DeviceError: a kernel failed.
    """
    devices = opened_devices() or [device_for(resolve())]
    found = Profile(devices)
    for index, device in enumerate(devices):
        device.queue.watch(partial(_add, found, index))
    try:
        yield found
    finally:
        for device in devices:
            device.queue.watch(None)


def _add(found: Profile, device: int, recording: Recording, spans: list[Span]) -> None:
    for step, (start, end) in zip(recording.steps, spans, strict=True):
        kernel, dispatch, sizes = step.kernel, step.step, recording.sizes
        moved = evaluate(dispatch.bytes_read, sizes) + evaluate(dispatch.bytes_written, sizes)
        found.runs.append(
            KernelRun(
                kernel.name,
                kernel.kind,
                kernel.ops,
                kernel.sources,
                recording.name,
                device,
                start,
                end - start,
                moved,
                evaluate(dispatch.flops, sizes),
            )
        )
