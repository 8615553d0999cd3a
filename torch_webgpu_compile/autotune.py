"""Tilings by measurement: what ``mode="max-autotune"`` does, and the tables of what it found.

A table maps a `MatmulProblem` of one adapter to its fastest tiling. Tables come with this package
for adapters that somebody measured (``tunings/``), are kept for the process, and on disk where a
cache folder is given. They are used in every mode; only max-autotune adds to them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from .codegen.contraction import Tilings, generate_tiled, kernels_of, problem_of
from .codegen.matmul_tiling import MatmulProblem, MatmulTiling, matmul_candidates
from .errors import DeviceError, DeviceLostError, OutOfMemoryError
from .files import write_atomically
from .ir.graph import AnchorGroup, ContractionGroup, PairGroup, Schedule, SiblingGroup
from .ir.nodes import Contraction
from .options import CompileOptions
from .plan.model import STATUS, STATUS_BUFFER, KernelCall, Plan, PlanBuffer
from .runtime.device import Device
from .runtime.executor import Executor
from .runtime.profiler import best_seconds
from .target import Target

Tune = Callable[[Schedule], Tilings]
"""Measures what a schedule needs and returns every tiling known."""

_log = logging.getLogger(__name__)

_ROUNDS = 3
_ROUND_SECONDS = 0.004
_SHIPPED = Path(__file__).parent / "tunings"
_lock = threading.Lock()
_measured: dict[tuple[str, str | None], dict[str, MatmulTiling]] = {}


def known_tilings(target: Target, folder: str | None) -> Tilings:
    """The table of an adapter, as far as it is known. ``folder``: the cache folder, if any."""
    with _lock:
        return dict(_table(target, folder))


def tilings_for(target: Target, options: CompileOptions) -> Tilings:
    """The tilings that a compilation may use.

    A measurement may turn out otherwise in the next run, and sums in another order: where results
    are to be the same bits in every run, these are the tilings of this package alone.
    """
    if options.deterministic:
        return _read(_SHIPPED / _file_name(target))
    return known_tilings(target, options.cache)


def tuner(device: Device, folder: str | None) -> Tune:
    """What measures on ``device``, and adds to its table (also in ``folder``)."""

    def tune(schedule: Schedule) -> Tilings:
        known = known_tilings(device.target, folder)
        work: dict[str, _Candidates] = {}
        for group in _contractions(schedule, device.target):
            problem = problem_of(group, schedule.graph.buffers, device.target)
            key = problem.key
            if key is not None and key not in known and key not in work and problem.itemsize < 8:
                work[key] = _candidates(group, schedule, problem, device.target)
        with suppress(DeviceError):  # of a kernel that the driver refuses; the others are compiled
            device.compile_many([c.kernel for calls in work.values() for c in calls.values()])
        found = {key: _fastest(key, calls, schedule, device) for key, calls in work.items()}
        if found:
            _add(device.target, folder, found)
        return {**known, **found}

    return tune


def _contractions(schedule: Schedule, target: Target) -> Iterator[ContractionGroup]:
    """What each kernel of contractions computes."""
    for group in schedule.groups:
        match group:
            case SiblingGroup() | PairGroup() | AnchorGroup(anchor=Contraction()):
                yield from kernels_of(group, schedule.graph.buffers, target)


# ---- measuring


_Candidates = dict[MatmulTiling, KernelCall]


def _candidates(
    group: ContractionGroup, schedule: Schedule, problem: MatmulProblem, target: Target
) -> _Candidates:
    return {
        tiling: generate_tiled(group, schedule.graph.buffers, target, problem, tiling)
        for tiling in matmul_candidates(problem, target)
    }


def _fastest(key: str, calls: _Candidates, schedule: Schedule, device: Device) -> MatmulTiling:
    times: dict[MatmulTiling, float] = {}
    for tiling, call in calls.items():
        try:
            times[tiling] = seconds_of(call, schedule, device)
        except (OutOfMemoryError, DeviceLostError):
            raise
        except DeviceError:  # a driver may refuse what its limits allow
            continue
    if not times:
        raise DeviceError(f"no tiling of {key} runs on {device.target.name}; report it")
    for tiling, seconds in sorted(times.items(), key=lambda item: item[1]):
        _log.debug("%s: %.2f µs %s", key, seconds * 1e6, tiling)
    return min(times, key=times.__getitem__)


def seconds_of(call: KernelCall, schedule: Schedule, device: Device) -> float:
    """Seconds of one dispatch among many, on memory of its own.

    Raises:
        DeviceError: the device refuses the kernel.
        OutOfMemoryError: its operands do not fit beside what is allocated.
    """
    executor = Executor(_single(call, schedule), device)
    bound = executor.bind()
    with executor.lock:
        return best_seconds(bound.replay, device, _ROUND_SECONDS, _ROUNDS)


def _single(call: KernelCall, schedule: Schedule) -> Plan:
    """A plan of one dispatch."""
    buffers = {}
    names = {binding.buffer for binding in call.bindings}
    if STATUS in names:  # memory of its own: what it computes with are no indices
        names.remove(STATUS)
        buffers[STATUS] = replace(STATUS_BUFFER, role="intermediate")
    for name in names:
        b = schedule.graph.buffers[name]
        buffers[name] = PlanBuffer(
            name, "intermediate", b.dtype, b.sizes, b.strides, b.offset, b.nbytes
        )
    return Plan("autotune", (call.kernel,), buffers, (call.dispatch(0),), (), ())


# ---- tables


def _table(target: Target, folder: str | None) -> dict[str, MatmulTiling]:
    key = target.name, folder
    if key not in _measured:
        found = _read(_SHIPPED / _file_name(target))
        if folder is not None:
            found = found | _read(Path(folder) / "tunings" / _file_name(target))
        _measured[key] = found
    return _measured[key]


def _add(target: Target, folder: str | None, found: dict[str, MatmulTiling]) -> None:
    with _lock:
        table = _table(target, folder)
        table.update(found)
        if folder is not None:
            path = Path(folder) / "tunings" / _file_name(target)
            table.update({**_read(path), **table})  # what other processes found meanwhile
            _write(path, table)


def _file_name(target: Target) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", f"{target.name} {target.backend}".lower())
    return f"{words.strip('-')}.json"


def _read(path: Path) -> dict[str, MatmulTiling]:
    """A table; an empty one where there is none, or none that can be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: MatmulTiling(**fields) for key, fields in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, table: Tilings) -> None:
    lines = [f"{json.dumps(key)}: {json.dumps(asdict(table[key]))}" for key in sorted(table)]
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
