"""Compiled plans by the text of their loop graphs: in memory, and on disk when a folder is given.

The key covers everything that a plan follows from: the graph with its constants, the GPU, the
options that change code, and the version of this package's sources. Stored plans are JSON
(`plan.serialize`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from .autotune import tilings_for
from .files import write_atomically
from .ir.graph import LoopGraph
from .ir.text import format_graph
from .options import CompileOptions
from .plan import serialize
from .plan.model import Plan
from .target import Target

_MAX_PLANS = 64
_memory: OrderedDict[str, Plan] = OrderedDict()
_lock = threading.Lock()


def key_of(graph: LoopGraph, target: Target, options: CompileOptions) -> str:
    """What the plan of ``graph`` is stored under."""
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
    """All that a plan takes from its target."""
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


def load(key: str, name: str, folder: str | None) -> Plan | None:
    """The plan stored under ``key``, named ``name``; None when there is none that can be read."""
    with _lock:
        found = _memory.get(key)
        if found is not None:
            _memory.move_to_end(key)
    if found is None and folder is not None:
        try:
            data = json.loads((Path(folder) / f"{key}.json").read_text(encoding="utf-8"))
            found = serialize.from_json(data)
        except (OSError, ValueError):
            return None
        _remember(key, found)
    return None if found is None else found.renamed(name)


def store(key: str, plan: Plan, folder: str | None) -> None:
    """Keeps ``plan``. A folder that cannot be written raises OSError."""
    _remember(key, plan)
    if folder is None:
        return
    write_atomically(Path(folder) / f"{key}.json", json.dumps(serialize.to_json(plan)))


def _remember(key: str, plan: Plan) -> None:
    with _lock:
        _memory[key] = plan
        while len(_memory) > _MAX_PLANS:
            _memory.popitem(last=False)


def clear() -> None:
    """Forgets the plans in memory; those on disk stay."""
    with _lock:
        _memory.clear()
