"""Autotuning of tilings, for ``mode="max-autotune"``, and tables of its results.

A table maps a `MatmulProblem` of one adapter to its fastest tiling. Tables come with this package
for adapters that somebody measured (``tables``), are kept for the process, and on disk where a
cache folder is given. They are used in every mode; only max-autotune adds to them.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from ..codegen.kernels.contraction import generate_contraction
from ..codegen.tilings.contraction import (
    MeasuredTiling,
    TilingTable,
    has_shifts,
    problem_of,
    shifted,
    units_tiling,
)
from ..codegen.tilings.matmul import (
    MatmulProblem,
    MatmulTiling,
    fits,
    has_few_rows,
    matmul_candidates,
    measurable_tilings,
)
from ..codegen.tilings.units import (
    FACTORS,
    IN_UNITS,
    UnitsTiling,
    units_candidates,
    units_fit,
    units_key,
)
from ..errors import DeviceError, DeviceLostError, OutOfMemoryError
from ..ir.anchors import contraction_groups
from ..ir.graph import ContractionGroup, Schedule
from ..options import CompileOptions
from ..plan.cache_folder import CacheFolder, write_atomically
from ..plan.codec import codec_of
from ..plan.model import STATUS, STATUS_BUFFER, KernelCall, Plan, PlanBuffer
from ..runtime.device import Device
from ..runtime.executor import Executor
from ..runtime.profiler import best_seconds
from ..target import Target

Tune = Callable[[Schedule], TilingTable]
"""Measures what a schedule needs and returns every tiling known."""

_log = logging.getLogger(__name__)

_ROUNDS = 3
_ROUND_SECONDS = 0.004
_SHIPPED = Path(__file__).parent / "tables"
_lock = threading.Lock()
_measured: dict[tuple[str, str | None], dict[str, MeasuredTiling]] = {}


def known_tilings(target: Target, folder: str | None) -> TilingTable:
    """The table of an adapter, as far as it is known. ``folder``: the cache folder, if any."""
    with _lock:
        return dict(_table(target, folder))


def tilings_for(target: Target, options: CompileOptions) -> TilingTable:
    """The tilings that a compilation may use.

    A measurement may turn out otherwise in the next run, and sums in another order: where results
    are to be the same bits in every run, these are the tilings of this package alone.
    """
    if options.deterministic:
        return _shipped(target)
    return known_tilings(target, options.cache)


def tuner(device: Device, folder: str | None) -> Tune:
    """A function that measures tilings on ``device`` for the contractions of a schedule.

    It skips problems whose best tiling is known, keeps what it finds in the device's table (and, if
    given, in ``folder``), and returns all known tilings.
    """

    def tune(schedule: Schedule) -> TilingTable:
        known = known_tilings(device.target, folder)
        work: dict[str, _Candidates] = {}
        for group in contraction_groups(schedule):
            problem = problem_of(group, schedule.graph.buffers)
            computed: ContractionGroup = group
            if has_shifts(group):
                computed, problem = shifted(group, problem)
            units = units_tiling(computed, problem, device.target)
            key = problem.key if units is None else units_key(problem, units)
            if key is None or key in known or key in work or problem.itemsize == 8:
                continue
            if not has_few_rows(problem):
                work[key] = _candidates(group, schedule, problem, units, device.target)
        with suppress(DeviceError):  # of a kernel that the driver refuses; the others are compiled
            device.pipelines.compile_many(
                [c.kernel for calls in work.values() for c in calls.values()]
            )
        found = {key: _fastest(key, calls, schedule, device) for key, calls in work.items()}
        if found:
            _add(device.target, folder, found)
        return {**known, **found}

    return tune


# ---- measuring


_Candidates = dict[MeasuredTiling, KernelCall]


def _candidates(
    group: ContractionGroup,
    schedule: Schedule,
    problem: MatmulProblem,
    units: UnitsTiling | None,
    target: Target,
) -> _Candidates:
    """``units``: the tiling for matrix units that is chosen without a measurement, if any."""
    tilings: Iterable[MeasuredTiling] = matmul_candidates(problem, target)
    if units is not None:
        offered = units_candidates(units.unit, units.factor, units.lanes)
        tilings = (tiling for tiling in offered if units_fit(tiling, problem, target))
    buffers = schedule.graph.buffers
    return {
        tiling: generate_contraction(group, problem, buffers, target, tiling) for tiling in tilings
    }


def _fastest(key: str, calls: _Candidates, schedule: Schedule, device: Device) -> MeasuredTiling:
    times: dict[MeasuredTiling, float] = {}
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
    names = {binding.buffer for binding in call.step.bindings}
    if STATUS in names:  # memory of its own: what it computes with are no indices
        names.remove(STATUS)
        buffers[STATUS] = replace(STATUS_BUFFER, role="intermediate")
    for name in names:
        b = schedule.graph.buffers[name]
        buffers[name] = PlanBuffer(
            name, "intermediate", b.dtype, b.sizes, b.strides, b.offset, b.nbytes
        )
    return Plan("autotune", (call.kernel,), buffers, (call.step,), (), ())


# ---- tables

_OF_INVOCATIONS, _OF_UNITS = codec_of(MatmulTiling), codec_of(UnitsTiling)


def _table(target: Target, folder: str | None) -> dict[str, MeasuredTiling]:
    key = target.name, folder
    if key not in _measured:
        found = _shipped(target)
        if folder is not None:
            found = found | _stored(target, folder)
        _measured[key] = found
    return _measured[key]


def _shipped(target: Target) -> dict[str, MeasuredTiling]:
    with suppress(OSError):
        return read_table(_SHIPPED / target.file_name)
    return {}


def _add(target: Target, folder: str | None, found: dict[str, MeasuredTiling]) -> None:
    with _lock:
        table = _table(target, folder)
        table.update(found)
        if folder is not None:
            table.update({**_stored(target, folder), **table})  # what others found meanwhile
            content = _text(table).encode()
            _tables_in(folder).write(target.file_name, target.identity, content)


def _tables_in(folder: str) -> CacheFolder:
    return CacheFolder(Path(folder) / "tunings")


def _stored(target: Target, folder: str) -> dict[str, MeasuredTiling]:
    """The table in a cache folder, without tilings that this version would not measure here."""
    content = _tables_in(folder).read(target.file_name, target.identity)
    if content is None:
        return {}
    try:
        table = _parse(content)
    except ValueError:
        return {}
    return {key: tiling for key, tiling in table.items() if _is_measurable(key, tiling, target)}


def _is_measurable(key: str, tiling: MeasuredTiling, target: Target) -> bool:
    if isinstance(tiling, UnitsTiling):
        unit, factor, lanes = tiling.unit, tiling.factor, target.subgroup_size
        is_offered = factor in FACTORS and tiling.config in target.subgroup_matrix_configs
        return is_offered and tiling in units_candidates(unit, factor, lanes)
    bits, axes = re.match(r"(\d+)-bit ", key), key.split(" ")[-2:]
    return (
        bits is not None
        and replace(tiling, strips=0) in measurable_tilings()
        and 0 <= tiling.strips < 1 << 16
        and fits(tiling, int(bits[1][:3]) // 8, axes, target)
    )


def read_table(path: Path) -> dict[str, MeasuredTiling]:
    """A table as those in ``tuning/tables``. Raises OSError, and ValueError for what is none."""
    return _parse(path.read_bytes())


def write_table(path: Path, table: TilingTable) -> None:
    """Writes a table as those in ``tuning/tables``. Raises OSError."""
    write_atomically(path, _text(table).encode())


def _text(table: TilingTable) -> str:
    lines = [f"{json.dumps(key)}: {json.dumps(asdict(table[key]))}" for key in sorted(table)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _parse(content: bytes) -> dict[str, MeasuredTiling]:
    """A table from JSON. Raises ValueError for other content."""
    try:
        table = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(table, dict):
        raise ValueError("it is no table")
    codecs = {key: _OF_UNITS if key.endswith(IN_UNITS) else _OF_INVOCATIONS for key in table}
    return {key: codecs[key].decode(fields) for key, fields in table.items()}
