"""Stored plans that are damaged: what is read of them is refused, or right."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.plan_mutations import altered, damaged, without_program, without_reports
from tests.trust.faults import Tally, fault
from torch_webgpu_compile import backend
from torch_webgpu_compile.callables.host_graph import HostGraph
from torch_webgpu_compile.callables.signature import Signature
from torch_webgpu_compile.compiler import Compilation, compile_graph
from torch_webgpu_compile.plan import cache as plan_cache
from torch_webgpu_compile.plan import cache_folder, serialize
from torch_webgpu_compile.plan.cache_folder import CacheFolder
from torch_webgpu_compile.plan.model import Plan
from torch_webgpu_compile.planner.match import verify_match
from torch_webgpu_compile.runtime.device import device_for

_KEY = hashlib.sha256(b"key").hexdigest()
_DAMAGED, _ALTERED = 6_000, 4_000


def _mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = torch.softmax(x @ w, -1) + torch.tensor([0.5, 1.5, 2.5])
    return torch.cumsum(y @ y.t(), 0).sort(-1).values, y.sum(0)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(x @ x.t()) + 1


def _prepared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ (w / w.norm(dim=0)))


class _Entry:
    """A function with its stored plan, which is then replaced by others."""

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        dynamic: bool = False,
    ) -> None:
        states: list[Compilation] = []

        def compile_one(*given: Any, **keywords: Any) -> Compilation:
            states.append(compile_graph(*given, **keywords))
            return states[-1]

        module = torch.nn.Module()
        for number, tensor in enumerate(parameters):
            module.register_buffer(f"p{number}", tensor)
        module.forward = lambda *given: function(*given, *module.buffers())  # type: ignore[method-assign]
        torch._dynamo.reset()
        with torch.no_grad(), mock.patch.object(backend, "compile_graph", compile_one):
            torch.compile(module, backend="webgpu", dynamic=dynamic)(*arguments)
        (self.state,) = states
        self.plan = self.state.plan
        self.folder = tempfile.mkdtemp()
        plan_cache.store(_KEY, self.plan, self.folder)
        (self.path,) = Path(self.folder).glob("*.plan")
        self.data = serialize.to_json(self.plan)

    def read(self) -> Plan | None:
        plan_cache.clear()
        return plan_cache.load(_KEY, self.folder, lambda plan: verify_match(plan, self.state.graph))

    def write(self, data: Any) -> None:
        CacheFolder(self.folder).write(self.path.name, _KEY, json.dumps(data).encode())


def _entries() -> list[_Entry]:
    torch.manual_seed(0)
    return [
        _Entry(_mixed, torch.randn(6, 4), torch.randn(4, 3)),
        _Entry(_on_host, torch.randn(5, 3)),
        _Entry(_mixed, torch.randn(6, 4), torch.randn(4, 3), dynamic=True),
        _Entry(_prepared, torch.randn(6, 4), parameters=[torch.randn(4, 3)]),
    ]


@fault("bytes of stored plans flipped, cut, moved: never used")
def damaged_entries(tally: Tally) -> None:
    chance = random.Random(0)
    for entry in _entries():
        stored = entry.path.read_bytes()
        for _ in range(_DAMAGED // 4):
            changed = damaged(stored, chance)
            entry.path.write_bytes(changed)
            found = entry.read()
            tally(found == (entry.plan if changed == stored else None), "a damaged plan was used")


@fault("plans changed, with a right checksum: refused, or of the same results", seconds=300)
def altered_plans(tally: Tally) -> None:
    """What kernels compute is left out: only the checksum protects that."""
    chance = random.Random(0)
    for entry in _entries():
        for _ in range(_ALTERED // 4):
            entry.write(altered(entry.data, chance))
            found = entry.read()
            if found is None or found == entry.plan:
                tally(True)
            elif without_reports(found) == without_reports(entry.plan):
                tally(_same_results(entry, found), "a plan that was changed computes otherwise")
            else:
                same = without_program(found) == without_program(entry.plan)
                tally(same, "a plan of other inputs, results or memory was used")


def _same_results(entry: _Entry, plan: Plan) -> bool:
    made = [_results(entry.state, each) for each in (plan, entry.plan)]
    return all(map(torch.equal, *made))


def _results(state: Compilation, plan: Plan) -> list[torch.Tensor]:
    own = Signature(plan, static_inputs=state.captured.static_inputs)
    graph = HostGraph(own, device_for(state.options))
    generator = torch.Generator().manual_seed(1)
    values: list[Any] = []
    for entry in plan.inputs:
        if entry.buffer is None:
            values.append(6)
        else:
            sizes = [size.constant or 6 for size in plan.buffers[entry.buffer].sizes]
            values.append(torch.randn(sizes, generator=generator))
    return [result for result in graph(values) if isinstance(result, torch.Tensor)]


@fault("a cache folder that is full, read-only, a file, gone, or anybody's: a warning")
def unusable_folders(tally: Tally) -> None:
    x = torch.arange(35.0).reshape(5, 7)  # of exact results: x * 3 + 1 may be fused

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def run(folder: Path, what: str) -> None:
        torch._dynamo.reset()
        plan_cache.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"cache": str(folder)}
            function = torch.compile(lambda x: x * 3 + 1, backend="webgpu", options=options)
            for count in (5, 4):  # the second one warns no more
                tally(torch.equal(function(x[:count]), x[:count] * 3 + 1), f"{what}: wrong")
        found = [w for w in caught if "cache folder" in str(w.message)]
        tally(len(found) == 1, f"{what}: {len(found)} warnings")

    base = Path(tempfile.mkdtemp())
    for what, fails in (("full", full), ("read-only", denied)):
        with mock.patch.object(cache_folder.tempfile, "mkstemp", fails):
            run(base / what, what)
    (base / "file").write_text("")
    run(base / "file", "a file")
    run(base / "file" / "below", "below a file")
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    run(base / "open", "open to all")
