"""Compiled plans by a key that covers all that they follow from: in memory, and in a folder.

Stored plans are JSON (`serialize`) in entries of a `CacheFolder`, all of which are bounded in size
(`stored_entries`). One that comes from there is verified before it is used, in itself (`verify`)
and against what asks for it; what fails is compiled again. That leaves what a plan computes: the
text of its kernels, their grids, parameters and order are only protected by the entry's checksum
and the folder's permissions.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import VerificationError
from . import serialize
from .cache_folder import digest_of
from .lru_cache import LruCache
from .model import Plan
from .stored_entries import file_name, read_entry, write_entry
from .verify import verify_plan

Verify = Callable[[Plan], None]

_log = logging.getLogger(__name__)

_MAX_PLANS = 64
_MAX_NBYTES = 256 << 20  # of their constants
_MAX_STORED_NBYTES = 16 << 20  # of one plan's: it takes a tenth of a second to write them
_SENT = ("plan", "graph", "dynamo", "call")  # what other machines can use
_memory: LruCache[str, Plan] = LruCache(_MAX_PLANS)
_lock = threading.Lock()
_used: dict[tuple[str, str], str] = {}  # folders by keys and kinds of entries


@cache
def sources_digest() -> str:
    """A digest of this package's sources, the same wherever they are installed."""
    folder = Path(__file__).parent.parent
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")])
    parts = ((str(path.relative_to(folder)).encode(), path.read_bytes()) for path in files)
    return digest_of(chain.from_iterable(parts))


@cache
def installation_digest() -> str:
    """A digest of this installation, so that an edit or an upgrade makes other keys.

    It is made of what Python itself tells stale bytecode by: sizes and times of files. These take
    a fifth of the time that `sources_digest` does, and each process needs them in its first call.
    """
    folder = Path(__file__).parent.parent
    if folder.is_dir():
        # A program that was frozen into one file has no sources.
        stamps = sorted(_stamps(str(folder))) or [_stamp(sys.executable, os.stat(sys.executable))]
    else:
        archive = next(path for path in folder.parents if path.exists())
        stamps = [_stamp(str(archive), archive.stat())]
    return digest_of(part.encode() for part in (str(folder), *stamps))


def _stamp(path: str, status: os.stat_result) -> str:
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def _stamps(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".pyc", ".jinja")):
                yield _stamp(entry.path, entry.stat())
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                yield from _stamps(entry.path)


def load(key: str, folder: str | None, verify: Verify) -> Plan | None:
    """The plan stored under ``key``; None when there is none, or none that is right.

    Args:
        folder: of the plans on disk.
        verify: raises VerificationError for a plan from there that is of something else.
    """
    with _lock:
        found = _memory.find(key)
    if found is None and folder is not None:
        found = _read_plan(key, folder, verify)
        if found is not None:
            _remember(key, found)
    return found


def load_by_way(key: str, folder: str, verify: Verify) -> Plan | None:
    """As `load`, where an entry of the folder has named ``key``: it follows from nothing that asks.

    So one from memory, which was only verified against who asked first, is verified, too.
    """
    found = load(key, folder, verify)
    try:
        if found is not None:
            verify(found)
    except VerificationError:
        return None
    return found


def _read_plan(key: str, folder: str, verify: Verify) -> Plan | None:
    text = _read(key, "plan", folder)
    if text is None:
        return None
    try:
        plan = serialize.loads(text)
        verify_plan(plan)
        verify(plan)
    except (serialize.PlanFormatError, VerificationError) as error:
        _log.info("the stored plan %s is compiled again: %s", key, error)
        return None
    return plan


def store(key: str, plan: Plan, folder: str | None) -> None:
    """Keeps ``plan``. Warns, once, about a folder that cannot be used but was asked for."""
    _remember(key, plan)
    if folder is None or _constant_nbytes(plan) > _MAX_STORED_NBYTES:
        return
    try:
        text = serialize.dumps(plan)
    except ValueError as error:
        _log.info("plan %s stays in memory: %s", plan.name, error)
    else:
        _write(key, "plan", text, folder)


def load_way(key: str, kind: str, folder: str) -> bytes | None:
    """What `store_way` was given for this key."""
    return _read(key, kind, folder)


def store_way(key: str, kind: str, content: bytes, folder: str) -> None:
    """Keeps the way to a plan from what it is of.

    Args:
        kind: ``graph`` of one that capture gives to lowering.
    """
    _write(key, kind, content, folder)


def load_object(key: str, kind: str, folder: str) -> Any:
    """What `store_object` was given for this key; None if there is nothing that can be read."""
    content = load_way(key, kind, folder)
    try:
        return None if content is None else pickle.loads(content)
    except Exception as error:  # whatever it is, the object is made again
        _log.info("the stored %s %s cannot be read: %s", kind, key, error)
        return None


def store_object(key: str, kind: str, content: Any, folder: str) -> None:
    """Keeps an object that plans are a part of, if it can be pickled.

    Args:
        kind: ``call`` of an operator's call, ``dynamo`` of a graph of Dynamo's.
    """
    try:
        data = pickle.dumps(content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        _log.info("the %s %s is not stored: %s", kind, key, error)
    else:
        _write(key, kind, data, folder)


def installed(key: str) -> str:
    """The key of this installation's entry for ``key``, which is the same on every machine.

    So an edit or an upgrade of the package makes other entries.
    """
    return digest_of((installation_digest().encode(), key.encode()))


def _read(key: str, kind: str, folder: str) -> bytes | None:
    content = read_entry(installed(key), kind, folder)
    if content is not None:
        _used[key, kind] = folder
    return content


def _write(key: str, kind: str, content: bytes, folder: str) -> None:
    if write_entry(installed(key), kind, content, folder):
        _used[key, kind] = folder


# ---- entries from here to there


def used_entries() -> Iterator[tuple[str, bytes]]:
    """The entries that this process wrote or read, for `take_entry`: names, and bytes."""
    for (key, kind), folder in list(_used.items()):
        content = _read(key, kind, folder)
        if content is not None:  # else it was removed
            yield file_name(key, kind), sources_digest().encode() + b"\n" + content


def take_entry(name: str, data: bytes, folder: str) -> None:
    """Keeps an entry of `used_entries` of another process, or machine, with the same sources."""
    sources, _, content = data.partition(b"\n")
    key, _, kind = name.partition(".")
    if sources.decode(errors="replace") == sources_digest() and kind in _SENT:
        _write(key, kind, content, folder)
    else:
        _log.info("%s is of another version of torch-webgpu-compile", name)


def _remember(key: str, plan: Plan) -> None:
    with _lock:
        _memory.keep(key, plan)
        while sum(map(_constant_nbytes, _memory.values())) > _MAX_NBYTES:
            _memory.popitem(last=False)


def _constant_nbytes(plan: Plan) -> int:
    inner = 0 if plan.preparation is None else _constant_nbytes(plan.preparation)
    return inner + sum(map(len, plan.constants.values()))


def clear() -> None:
    """Forgets the plans in memory; those on disk stay."""
    with _lock:
        _memory.clear()
