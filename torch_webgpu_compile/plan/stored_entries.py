"""The entries of a cache folder as files: which they are, and how large all may be together.

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

from .cache_folder import CacheFolder

MAX_NBYTES = 1 << 30
_KEPT_NBYTES = MAX_NBYTES // 10 * 9  # so that not every entry that is stored removes one
_PRUNE_NBYTES = 64 << 20
_PRUNE_SECONDS = 3600.0
_UNFINISHED_SECONDS = 3600.0
_MARK = ".pruned"
KINDS = {
    "plan": "compiled plans",
    "graph": "graphs with one",
    "dynamo": "graphs of Dynamo's with one, or two and what is around them",
    "call": "operators' calls with one",
    "dawn": "kernels, as Dawn compiled them",
    "template": "templates of kernels, as Python's code",
}
"""What there is in the folder, by the ending of its files' names."""
_NAME = re.compile(rf"[0-9a-f]{{64}}\.({'|'.join(KINDS)})(\.\w{{8}}\.tmp)?")
_lock = threading.Lock()
_written: dict[str, int] = {}


def file_name(key: str, kind: str) -> str:
    """The name of the file with the entry of ``key``, which is of one of `KINDS`."""
    return f"{key}.{kind}"


def read_entry(key: str, kind: str, folder: str) -> bytes | None:
    """What `write_entry` was given; None if there is no such entry, or a damaged one."""
    return CacheFolder(folder).read(file_name(key, kind), key)


def write_entry(key: str, kind: str, content: bytes, folder: str) -> bool:
    """Keeps an entry, and the folder within its bounds; whether it could. See `CacheFolder`."""
    is_written = CacheFolder(folder).write(file_name(key, kind), key, content)
    if is_written:
        prune_at_times(folder, len(content))
    return is_written


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file.

    Attributes:
        kind: one of `KINDS`.
        used: when it was last read or written, in seconds since the epoch.
    """

    path: str
    kind: str
    nbytes: int
    used: float


def stored_entries(folder: str) -> list[StoredEntry]:
    """The entries of a folder; with those that were never written to their end, after an hour."""
    found = []
    with suppress(OSError, ValueError), os.scandir(folder) as files:
        for file in files:
            match = _NAME.fullmatch(file.name)
            with suppress(OSError):
                if match and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    if not match[2] or status.st_mtime < time.time() - _UNFINISHED_SECONDS:
                        nbytes, used = status.st_size, status.st_mtime
                        found.append(StoredEntry(file.path, match[1], nbytes, used))
    return found


def remove(entries: Iterable[StoredEntry]) -> int:
    """Removes entries; how many of them it could."""
    count = 0
    for entry in entries:
        with suppress(OSError):
            os.unlink(entry.path)
            count += 1
    return count


def prune(folder: str) -> None:
    """Removes the entries that were used longest ago, if all have more than `MAX_NBYTES`."""
    entries = sorted(stored_entries(folder), key=lambda entry: entry.used)
    nbytes = sum(entry.nbytes for entry in entries)
    if nbytes <= MAX_NBYTES:
        return
    oldest = []
    for entry in entries:
        if nbytes <= _KEPT_NBYTES:
            break
        oldest.append(entry)
        nbytes -= entry.nbytes
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
