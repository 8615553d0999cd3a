"""Compiled plans by the text of their loop graphs: in memory, and on disk when a folder is given.

The key covers everything that a plan follows from: the graph with its constants, the GPU, the
options that change code, and the version of this package's sources. Stored plans are JSON
(`plan.serialize`) in entries of a `CacheFolder`. One that comes from there is verified before it is
used, in itself (`plan.verify`) and against the graph that asks for it (`plan_match`); what fails is
compiled again. That leaves what a plan computes: the text of its kernels, their grids, parameters
and order are only protected by the entry's checksum and the folder's permissions.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from .cache_folder import CacheFolder
from .errors import VerificationError
from .ir.graph import LoopGraph
from .ir.text import format_graph
from .options import CompileOptions
from .plan import serialize
from .plan.model import Plan
from .plan.verify import verify_plan
from .plan_match import verify_match
from .recent import Recent
from .target import Target
from .tuning.autotune import tilings_for

_log = logging.getLogger(__name__)

_MAX_PLANS = 64
_MAX_NBYTES = 256 << 20  # of their constants
_memory: Recent[str, Plan] = Recent(_MAX_PLANS)
_lock = threading.Lock()


def key_of(graph: LoopGraph, target: Target, options: CompileOptions) -> str:
    """The key of the plan of ``graph`` in the cache: a digest of all that decides about it."""
    digest = hashlib.sha256()
    for part in _parts(graph, target, options):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(graph: LoopGraph, target: Target, options: CompileOptions) -> Iterator[bytes]:
    yield sources_digest().encode()
    yield f"{target_text(target)} {options.fusion}".encode()
    yield repr(sorted(tilings_for(target, options).items())).encode()
    yield format_graph(replace(graph, name="graph")).encode()
    for name, data in sorted(graph.constants.items()):
        yield name.encode()
        yield memoryview(data).tobytes()


def target_text(target: Target) -> str:
    """A target as text, features sorted: equal for targets for which plans are equal."""
    return f"{replace(target, features=frozenset())!r} {','.join(sorted(target.features))}"


@cache
def sources_digest() -> str:
    """A digest of this package's sources, so that an edit or an upgrade empties the cache."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.jinja")]):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(key: str, graph: LoopGraph, folder: str | None) -> Plan | None:
    """The plan of ``graph``, stored under ``key``; None when there is none, or none that is right.

    The plan has the graph's name.
    """
    with _lock:
        found = _memory.find(key)
    if found is None and folder is not None:
        found = _read(key, graph, folder)
        if found is not None:
            _remember(key, found)
    return None if found is None else found.renamed(graph.name)


def _read(key: str, graph: LoopGraph, folder: str) -> Plan | None:
    text = CacheFolder(folder).read(_file_name(key), key)
    if text is None:
        return None
    try:
        plan = serialize.loads(text)
        verify_plan(plan)
        verify_match(plan, graph)
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
