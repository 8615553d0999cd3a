"""Measured rates of adapters: kept in the cache folder, and used where that is on.

``doctor --measure`` fills it. Adapters that nobody measured keep the numbers that `Machine` has.
"""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path

from ..options import CompileOptions
from ..plan.cache_folder import CacheFolder
from ..plan.codec import codec_of
from ..target import Machine, Target

_MEASURED = ("bytes_per_second", "flops_per_second", "dispatch_seconds", "multiprocessors")
_lock = threading.Lock()
_known: dict[tuple[str, str], Machine | None] = {}


def measured_target(target: Target, options: CompileOptions) -> Target:
    """The target with the machine that was measured on its adapter, if one was.

    As given where the cache is off, where it has another machine than the default one already, and
    where results are to be the same bits in every run: sums are divided by what a machine says, and
    another measurement would give another order.
    """
    if options.cache is None or options.deterministic or target.machine != Machine():
        return target
    found = measured(target, options.cache)
    return target if found is None else replace(target, machine=found)


def measured(target: Target, folder: str) -> Machine | None:
    """The measured rates of an adapter in a cache folder; None without any.

    A process reads it once, so that its plans agree.
    """
    with _lock:
        key = target.identity, folder
        if key not in _known:
            content = _machines_in(folder).read(target.file_name, target.identity)
            _known[key] = None if content is None else _parse(content)
        return _known[key]


def store(target: Target, machine: Machine, folder: str) -> bool:
    """Keeps measured rates; whether it could. `CacheFolder` warns of a folder that is no use."""
    content = json.dumps(codec_of(Machine).encode(machine)).encode()
    with _lock:
        _known[target.identity, folder] = _parse(content)
        return _machines_in(folder).write(target.file_name, target.identity, content)


def _machines_in(folder: str) -> CacheFolder:
    return CacheFolder(Path(folder) / "machines")


def _parse(content: bytes) -> Machine | None:
    """A machine from JSON; None for other content, or that of another version."""
    try:
        machine: Machine = codec_of(Machine).decode(json.loads(content))
    except (ValueError, RecursionError):
        return None
    found = {name: getattr(machine, name) for name in _MEASURED}
    is_possible = all(math.isfinite(value) and value > 0 for value in found.values())
    return replace(Machine(), **found) if is_possible else None
