"""`explain`: a report of how a function was compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..backend import compile_module
from ..capture.graph import dynamo
from ..compiler import Compilation
from ..counters import counters
from ..errors import AdapterError, DeviceError, OutOfMemoryError
from ..options import CompileOptions, resolve
from ..plan.model import STATUS, Dispatch, HostStep, Plan
from ..runtime.device import Device, device_for, opened_devices
from ..runtime.executor import KnownCall
from ..runtime.interface import Span
from ..runtime.limits import copy_bytes_per_second
from ..runtime.queue import Recording
from ..stages import Stage, Sums, telling
from ..symbolic.sizes import Expr, evaluate
from ..target import Machine
from .compile_time import CompileTime, compile_time_of
from .graph_report import (
    HEADS,
    GraphReport,
    HostReport,
    KernelReport,
    cells_of,
    clip,
    dispatches_of,
    lines_of,
    numbered_steps,
)
from .memory import Memory, holdings_of, memory_of
from .report_html import in_frame, page
from .traffic import CopyRate, traffic_of


@dataclass(frozen=True)
class Report:
    """The result of `explain`. ``str(report)`` is a table.

    Attributes:
        graphs: in the order in which they were compiled.
        graph_breaks: why Dynamo split the function, one line each.
        on_host: operators that ran on the host in the call.
        result: what the function returned.
        copy_rate: of a copy on the GPU that ran it; None where none could be measured.
        compile_time: where the time of the call went.
    """

    graphs: tuple[GraphReport, ...]
    graph_breaks: tuple[str, ...]
    on_host: tuple[str, ...] = ()
    result: Any = field(repr=False, default=None)
    copy_rate: CopyRate | None = None
    compile_time: CompileTime = field(repr=False, default=CompileTime())

    @property
    def kernels(self) -> tuple[KernelReport, ...]:
        """The dispatches of all graphs."""
        return tuple(kernel for graph in self.graphs for kernel in graph.kernels)

    @property
    def dispatch_count(self) -> int:
        """Dispatches per call, with an empty grid left out."""
        return sum(graph.dispatch_count for graph in self.graphs)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Operators that run on the host, in the graphs and outside of them, each once."""
        in_graphs = (op for graph in self.graphs for op in graph.fallbacks)
        return tuple(dict.fromkeys((*in_graphs, *self.on_host)))

    @property
    def memory(self) -> Memory:
        """The GPU memory that calls of all graphs need, one after the other.

        What several graphs have counts once.
        """
        graphs = self.graphs
        holdings = (holding for graph in graphs for holding in graph.holdings)
        kept = sum(graph.peak_nbytes for graph in graphs if graph.keeps_peak)
        most = max((graph.peak_nbytes for graph in graphs if not graph.keeps_peak), default=0)
        return memory_of(holdings, kept + most)

    def save_html(self, path: str | Path) -> None:
        """Writes a page that needs nothing else: every graph drawn, every kernel's WGSL."""
        Path(path).write_text(self._page(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for a notebook."""
        return in_frame(self._page())

    def _page(self) -> str:
        return page(
            *(self.graphs, self.fallbacks, self.graph_breaks, self.memory),
            *(self.copy_rate, self.compile_time),
        )

    def __str__(self) -> str:
        lines = []
        for graph in self.graphs:
            lines += [_title(graph), *_table(graph), *lines_of(graph, self.copy_rate), ""]
        lines.append(f"{len(self.graphs)} graphs, {self.dispatch_count} dispatches per call")
        lines.append(f"memory of all: {self.memory}")
        lines.append("on the host: " + (", ".join(self.fallbacks) or "nothing"))
        lines.append(f"graph breaks: {len(self.graph_breaks)}")
        lines += [f"  {reason}" for reason in self.graph_breaks]
        lines += self.compile_time.lines
        return "\n".join(lines)


def _title(graph: GraphReport) -> str:
    return f"{graph.name} ({graph.phase}): {dispatches_of(graph)}"


def _table(graph: GraphReport) -> list[str]:
    rows: list[tuple[str, ...]] = [HEADS]
    for _, mark, step in numbered_steps(graph):
        *cells, ops, source = cells_of(step, mark)
        shown = ops if isinstance(step, HostReport) else ops.replace("aten.", "")
        rows.append((*cells, shown, source))
    widths = [min(60, max(len(row[k]) for row in rows)) for k in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(clip(cell, n).ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def explain(
    fn: Callable[..., Any],
    *args: Any,
    webgpu_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles ``fn`` (a function or module) afresh, calls it once and reports what was made of it.

    Args:
        fn: what would be given to ``torch.compile``; an already compiled one is unwrapped.
        webgpu_options: as ``options`` of ``torch.compile(backend="webgpu")``.
        args, kwargs: passed to ``fn``.

    Raises:
        What compiling and calling ``fn`` raise.
    """
    target = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", None) or fn
    options = resolve(None, webgpu_options)
    seen: list[tuple[Compilation, Device, Callable[[], KnownCall | None]]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with Stage("backend"):
            return compile_module(module, inputs, options, lambda *entry: seen.append(entry))

    from ..torch_private import dynamo_counters  # Dynamo takes a second

    breaks = dynamo_counters["graph_break"]
    before, host_calls = dict(breaks), counters.fallbacks.copy()
    timed: dict[str, tuple[int, float]] = {}
    sums, start = Sums(), perf_counter()
    with telling(sums), _timing(timed, options), dynamo.stages():
        result = torch.compile(target, backend=backend)(*args, **kwargs)
    compile_time = compile_time_of(sums, perf_counter() - start)
    reasons = [
        " ".join(str(reason).split())
        for reason, count in breaks.items()
        for _ in range(count - before.get(reason, 0))
    ]
    on_host = tuple(counters.fallbacks - host_calls)
    rate = _copy_rate(seen[0][1]) if seen else None
    graphs = tuple(_graph_report(state, call(), timed) for state, _, call in seen)
    return Report(graphs, tuple(reasons), on_host, result, rate, compile_time)


@contextmanager
def _timing(timed: dict[str, tuple[int, float]], options: CompileOptions) -> Iterator[None]:
    """Adds to ``timed`` what dispatches move and how long they take, by the name of their plan.

    Only on GPUs with timestamps that nobody else watches.
    """
    opened = opened_devices()
    with suppress(AdapterError), Stage("device"):  # compiling says what is missing
        opened = opened or [device_for(options)]
    devices = [
        device
        for device in opened
        if "timestamp-query" in device.target.features and not device.queue.is_watched
    ]

    def add(recording: Recording, spans: list[Span]) -> None:
        nbytes, seconds = timed.get(recording.name, (0, 0.0))
        for step, (start, end) in zip(recording.steps, spans, strict=True):
            dispatch = step.step
            for moved in (dispatch.bytes_read, dispatch.bytes_written):
                nbytes += round(evaluate(moved, recording.sizes) * step.share)
            seconds += end - start
        timed[recording.name] = nbytes, seconds

    for device in devices:
        device.queue.watch(add)
    try:
        yield
    finally:
        for device in devices:
            device.queue.watch(None)


def _copy_rate(device: Device) -> CopyRate | None:
    known = device.target.machine
    if known != Machine():
        return CopyRate(known.bytes_per_second, device.info.name, False)
    try:
        return CopyRate(copy_bytes_per_second(device), device.info.name, True)
    except (DeviceError, OutOfMemoryError):
        return None  # there is no room for it beside the model, or the device is lost


def _graph_report(
    state: Compilation, call: KnownCall | None, timed: Mapping[str, tuple[int, float]]
) -> GraphReport:
    plan, static = state.plan, state.captured.static_inputs

    def number(expr: Expr) -> int:
        if call is None and not expr.is_constant:
            return 0  # never called: the sizes are unknown
        return evaluate(expr, call.sizes if call is not None else {})

    texts = {**state.captured.texts, "fx": state.captured.text, **state.texts()}
    inner = plan.preparation  # of parameters and buffers alone
    prepared = () if inner is None else _steps(inner, number, range(len(inner.inputs)))
    memory = {} if call is None else call.memory
    timed_nbytes, timed_seconds = timed.get(plan.name, (0, 0.0))
    return GraphReport(
        plan.name,
        state.phase.name,
        _steps(plan, number, static),
        texts,
        plan,
        prepared,
        state.seconds,
        timed_nbytes,
        timed_seconds,
        holdings_of(plan, static, state.phase.saved, memory, number),
        0 if call is None else call.peak_nbytes,
        call is not None and call.is_owned,
    )


def _steps(
    plan: Plan, number: Callable[[Expr], int], static: Collection[int]
) -> tuple[KernelReport | HostReport, ...]:
    steps: list[KernelReport | HostReport] = []
    for step in plan.steps:
        if isinstance(step, Dispatch):
            kernel = plan.kernels[step.kernel]
            pairs = zip(kernel.bindings, step.bindings, strict=True)
            bound = [(use, where) for use, where in pairs if where.buffer != STATUS]
            x, y, z = (number(size) for size in step.grid)
            steps.append(
                KernelReport(
                    name=kernel.name,
                    kind=kernel.kind,
                    ops=kernel.ops,
                    wgsl=kernel.wgsl,
                    grid=(x, y, z),
                    bytes_read=number(step.bytes_read),
                    bytes_written=number(step.bytes_written),
                    flops=number(step.flops),
                    sources=kernel.sources,
                    reads=_names(where.buffer for use, where in bound if not use.writable),
                    writes=_names(where.buffer for use, where in bound if use.writable),
                    traffic=traffic_of(plan, step, static, number),
                )
            )
        elif isinstance(step, HostStep):
            reads = _names(step.reads)
            steps.append(HostReport(step.target, step.source, reads, step.outputs))
    return tuple(steps)


def _names(buffers: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(buffers))
