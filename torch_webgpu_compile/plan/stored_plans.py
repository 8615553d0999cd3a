"""The plans of a cache folder as files: which they are, and how many there may be.

Other files of the folder are never touched. Processes may do all of this at the same time: a file
that another one removed meanwhile is gone, which is what was wanted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_NBYTES = 1 << 30
_KEPT_NBYTES = MAX_NBYTES // 10 * 9  # so that not every plan that is stored removes one
_PRUNE_NBYTES = 64 << 20
_PRUNE_SECONDS = 3600.0
_UNFINISHED_SECONDS = 3600.0
_MARK = ".pruned"
_NAME = re.compile(r"[0-9a-f]{64}\.plan(\.\w{8}\.tmp)?")
_lock = threading.Lock()
_written: dict[str, int] = {}


def file_name(key: str) -> str:
    """The name of the file with the plan of ``key``."""
    return f"{key}.plan"


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A file.

    Attributes:
        used: when it was last read or written, in seconds since the epoch.
    """

    path: str
    nbytes: int
    used: float


def stored_plans(folder: str) -> list[StoredPlan]:
    """The plans of a folder; with those that were never written to their end, after an hour."""
    found = []
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                if match and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if not match[1] or status.st_mtime < time.time() - _UNFINISHED_SECONDS:
                        found.append(StoredPlan(entry.path, status.st_size, status.st_mtime))
    return found


def remove(plans: Iterable[StoredPlan]) -> int:
    """Removes plans; how many of them it could."""
    count = 0
    for plan in plans:
        with suppress(OSError):
            os.unlink(plan.path)
            count += 1
    return count


def prune(folder: str) -> None:
    """Removes the plans that were used longest ago, if all have more than `MAX_NBYTES`."""
    plans = sorted(stored_plans(folder), key=lambda plan: plan.used)
    nbytes = sum(plan.nbytes for plan in plans)
    if nbytes <= MAX_NBYTES:
        return
    oldest = []
    for plan in plans:
        if nbytes <= _KEPT_NBYTES:
            break
        oldest.append(plan)
        nbytes -= plan.nbytes
    remove(oldest)


def prune_at_times(folder: str, nbytes: int) -> None:
    """Prunes a folder after ``nbytes`` were stored, if there is reason to look at its files.

    That is once an hour, for all processes, and after each 64 MiB that this one has stored.
    """
    mark = Path(folder) / _MARK
    with _lock:
        written = _written[folder] = _written.get(folder, 0) + nbytes
        with suppress(OSError):
            if written < _PRUNE_NBYTES and time.time() - mark.stat().st_mtime < _PRUNE_SECONDS:
                return
        _written[folder] = 0
    with suppress(OSError):
        mark.touch()
    prune(folder)
