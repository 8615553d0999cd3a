"""Compiled plans by a key that covers all that they follow from: in memory, and in a folder.

Stored plans are JSON (`serialize`) in entries of a `CacheFolder`. One that comes from there is
verified before it is used, in itself (`verify`) and against what asks for it; what fails is
compiled again. That leaves what a plan computes: the text of its kernels, their grids, parameters
and order are only protected by the entry's checksum and the folder's permissions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

from ..errors import VerificationError
from . import serialize
from .cache_folder import CacheFolder, digest_of
from .lru_cache import LruCache
from .model import Plan
from .verify import verify_plan

Verify = Callable[[Plan], None]

_log = logging.getLogger(__name__)

_MAX_PLANS = 64
_MAX_NBYTES = 256 << 20  # of their constants
_memory: LruCache[str, Plan] = LruCache(_MAX_PLANS)
_lock = threading.Lock()


@cache
def sources_digest() -> str:
    """A digest of this package's sources, so that an edit or an upgrade empties the cache."""
    folder = Path(__file__).parent.parent
    files = sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")])
    parts = ((str(path.relative_to(folder)).encode(), path.read_bytes()) for path in files)
    return digest_of(chain.from_iterable(parts))


def load(key: str, folder: str | None, verify: Verify) -> Plan | None:
    """The plan stored under ``key``; None when there is none, or none that is right.

    Args:
        folder: of the plans on disk.
        verify: raises VerificationError for a plan from there that is of something else.
    """
    with _lock:
        found = _memory.find(key)
    if found is None and folder is not None:
        found = _read(key, folder, verify)
        if found is not None:
            _remember(key, found)
    return found


def _read(key: str, folder: str, verify: Verify) -> Plan | None:
    text = CacheFolder(folder).read(_file_name(key), key)
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
    """Keeps ``plan``. Warns, once, about a folder that cannot be used."""
    _remember(key, plan)
    if folder is None:
        return
    try:
        text = serialize.dumps(plan)
    except ValueError as error:
        _log.info("plan %s stays in memory: %s", plan.name, error)
    else:
        CacheFolder(folder).write(_file_name(key), key, text)


def _file_name(key: str) -> str:
    return f"{key}.plan"


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
