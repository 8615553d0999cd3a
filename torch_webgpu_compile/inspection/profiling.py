"""`profile`: when each kernel ran and how close it came to what the GPU can do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from ..options import resolve
from ..runtime import limits
from ..runtime.device import Device, device_for, opened_devices
from ..runtime.interface import Span
from ..runtime.queue import Recording
from ..symbolic.sizes import evaluate
from ..tensors.deferred import settle


@dataclass(frozen=True)
class KernelRun:
    """One dispatch. A long kernel is divided into several, each with its part of the work.

    Attributes:
        name, kind, ops, sources: of the kernel; see `plan.model.Kernel`.
        plan: of the compiled graph or operator that it belongs to.
        device: the GPU's number among those in the profile.
        start: seconds of that GPU's clock.
        host_start: seconds since the epoch, by the host's clock: later by up to a submit's time.
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
    host_start: float
    seconds: float
    nbytes: int
    flops: int


@dataclass(frozen=True)
class KernelTotal:
    """Sums over all dispatches of one kernel of one plan."""

    name: str
    plan: str
    calls: int
    seconds: float
    nbytes: int
    flops: int
    source: str

    @property
    def bytes_per_second(self) -> float:
        """The mean rate of bytes read and written; 0 if no time was measured."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def flops_per_second(self) -> float:
        """The mean rate of floating-point operations; 0 if no time was measured."""
        return self.flops / self.seconds if self.seconds else 0.0


_HEADS = ("calls", "total ms", "share", "mean µs", "GB/s", "of copy", "TFLOP/s", "of peak")
_EMPTY = (
    "No kernel ran on the GPU meanwhile. A model on CPU tensors uses the GPU only when it is "
    'compiled, model = torch.compile(model, backend="webgpu"), and called inside of profile(); '
    'other models and their inputs have to be moved with .to("webgpu").'
)


class Profile:
    """The result of `profile`. Printing it gives a table.

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
        """The total of each kernel; that with the most seconds comes first."""
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
        """Seconds on the GPU of all dispatches together."""
        return sum(run.seconds for run in self.runs)

    def save_trace(
        self, path: str | os.PathLike[str], torch_trace: str | os.PathLike[str] | None = None
    ) -> None:
        """Writes a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

        Args:
            path: the file.
            torch_trace: what ``torch.profiler.profile.export_chrome_trace`` wrote about the same
                calls: its events are in the trace as well, on the same clock.

        Raises:
            ValueError: ``torch_trace`` is no such file.
        """
        trace: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
        first = min((run.start for run in self.runs), default=0.0)
        times = [run.start - first for run in self.runs]
        if torch_trace is not None:
            trace, base = _read_torch_trace(torch_trace)
            times = [run.host_start - base for run in self.runs]
        events = trace["traceEvents"]
        for k, name in enumerate(self.names):
            named = {"name": f"{name} (webgpu:{k})"}
            events.append(
                {"ph": "M", "name": "process_name", "pid": f"webgpu:{k}", "tid": 0, "args": named}
            )
        events += [_event(run, at) for run, at in zip(self.runs, times, strict=True)]
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace, file)

    def __str__(self) -> str:
        lines = [*self._limit_lines(), ""]
        if not self.runs:
            return "\n".join([*lines, _EMPTY])
        lines.append(f"{'kernel':44}" + "".join(f"{head:>10}" for head in _HEADS) + "  source")
        for total, cells in self._rows():
            row = "".join(f"{cell:>10}" for cell in cells)
            lines.append(f"{total.name[:43]:44}{row}  {total.source}")
        lines.append(f"{'all':44}{len(self.runs):>10}{self.seconds * 1e3:>10.3f}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The table, for a notebook."""
        limits = "<br>".join(map(escape, self._limit_lines()))
        if not self.runs:
            return f"<p>{limits}</p><p>{escape(_EMPTY)}</p>"
        rows = [f"<th>{escape(head)}</th>" for head in ("kernel", *_HEADS, "source")]
        lines = ["".join(rows)]
        for total, cells in self._rows():
            row = (total.name, *cells, total.source)
            lines.append("".join(f"<td>{escape(cell)}</td>" for cell in row))
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        total_ms = f"{len(self.runs)} dispatches, {self.seconds * 1e3:.3f} ms"
        return f"<p>{limits}</p><table>{table}</table><p>{total_ms}</p>"

    def _limit_lines(self) -> list[str]:
        return [
            f"{name}: a copy reaches {found.bytes_per_second / 1e9:.4g} GB/s, "
            f"f32 arithmetic {found.flops_per_second / 1e12:.3g} TFLOP/s"
            for name, found in zip(self.names, self.limits, strict=True)
        ]

    def _rows(self) -> Iterator[tuple[KernelTotal, tuple[str, ...]]]:
        """Each kernel with the cells under `_HEADS`."""
        best = max(self.limits, key=lambda found: found.bytes_per_second)
        for total in self.kernels:
            yield (
                total,
                (
                    str(total.calls),
                    f"{total.seconds * 1e3:.3f}",
                    f"{total.seconds / max(self.seconds, 1e-12):.1%}",
                    f"{total.seconds / total.calls * 1e6:.1f}",
                    f"{total.bytes_per_second / 1e9:.4g}",
                    f"{total.bytes_per_second / best.bytes_per_second:.0%}",
                    f"{total.flops_per_second / 1e12:.3g}",
                    f"{total.flops_per_second / best.flops_per_second:.0%}",
                ),
            )


def _read_torch_trace(path: str | os.PathLike[str]) -> tuple[dict[str, Any], float]:
    """A trace of ``torch.profiler``, and seconds from the epoch to its time 0."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    if not isinstance(trace, dict) or "baseTimeNanoseconds" not in trace:
        raise ValueError(
            f"{os.fspath(path)} is not a trace of torch.profiler: give what "
            "export_chrome_trace of a torch.profiler.profile wrote"
        )
    return trace, trace["baseTimeNanoseconds"] / 1e9


def _event(run: KernelRun, seconds: float) -> dict[str, object]:
    details = {
        "plan": run.plan,
        "ops": list(run.ops),
        "source": list(run.sources),
        "GB/s": run.nbytes / max(run.seconds, 1e-12) / 1e9,
        "GFLOP/s": run.flops / max(run.seconds, 1e-12) / 1e9,
    }
    return {
        "ph": "X",
        "name": run.name,
        "cat": run.kind,
        "pid": f"webgpu:{run.device}",
        "tid": 0,
        "ts": seconds * 1e6,
        "dur": run.seconds * 1e6,
        "args": details,
    }


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
    settle()
    devices = opened_devices() or [device_for(resolve())]
    found = Profile(devices)
    for index, device in enumerate(devices):
        device.queue.watch(partial(_add, found, index))
    try:
        yield found
        settle()
    finally:
        for device in devices:
            device.queue.watch(None)


def _add(found: Profile, device: int, recording: Recording, spans: list[Span]) -> None:
    to_host = time.time() - max((end for _, end in spans), default=0.0)
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
                start + to_host,
                end - start,
                round(moved * step.share),
                round(evaluate(dispatch.flops, sizes) * step.share),
            )
        )
