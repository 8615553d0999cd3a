"""Records programs with one tree's package, in a process of its own.

    python -P -m tests.replay.recorder PACKAGE FOLDER TARGETS

Names of programs come on the standard input, a line each, and go to the standard output when their
recordings are in ``FOLDER``. ``PACKAGE`` is the file `tests.replay.package`, or that of the tree;
``TARGETS`` are the adapters, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from tests.replay.cases import Program, program, seed
from tests.replay.recording import Recording
from tests.replay.sources import file_name

READY = "ready"


class Recorder:
    """A `Tracer` that records what each graph becomes on each target.

    Args:
        package: the module `tests.replay.package` of the tree.
        targets: by name.
    """

    def __init__(self, package: Any, targets: Mapping[str, Any]) -> None:
        self._package = package
        self._targets = {name: package.target_of(fields) for name, fields in targets.items()}
        self.recording = Recording()

    def restart(self) -> None:
        """`Tracer.restart`."""
        self.recording = Recording()
        torch._dynamo.reset()
        seed()

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`Tracer.compile`."""
        backend = self._package.backend(self._add, self._refuse)
        return torch.compile(function, backend=backend, **options)

    def call(self, op: Any, args: Any, kwargs: Any) -> None:
        """`Tracer.call`: with symbols, and as it is where that fails."""
        for dynamic in (True, False):
            try:
                graph = self._package.graph_of_call(op, args, kwargs, dynamic=dynamic)
            except Exception as error:
                self.fail(str(op), error)
                return
            if graph is not None:
                self._add(graph)
                return

    def fail(self, what: str, error: Exception) -> None:
        """`Tracer.fail`."""
        error = getattr(error, "inner_exception", error)  # Dynamo wraps those of a backend
        first = str(error).strip().partition("\n")[0]
        self._refuse(f"{what}: {type(error).__name__}: {first}")

    def record(self, run: Program) -> Recording:
        """All graphs of a program."""
        self.restart()
        try:
            run(self)
        except Exception as error:
            self.fail("the program", error)
        return self.recording

    def _refuse(self, text: str) -> None:
        for name in self._targets:
            self.recording.add(name, {"error": text}, {})

    def _add(self, graph: Any) -> None:
        for name, target in self._targets.items():
            self.recording.add(name, *self._package.compiled(graph, target))


def load_package(path: Path) -> Any:
    """The module that asks the package."""
    spec = spec_from_file_location("replayed_package", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.prepare()
    return module


def quiet() -> None:
    """Settings of a process that traces other people's code."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.CRITICAL)
    torch._dynamo.config.allow_rnn = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch.backends.mkldnn.set_flags(False)


def main() -> None:
    """The process."""
    path, folder, targets = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is none
    recorder = Recorder(load_package(Path(path)), json.loads(targets))
    quiet()
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        name = line.strip()
        content = recorder.record(program(name)).dumps()
        file = Path(folder) / file_name(name)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_bytes(content)
        unfinished.replace(file)
        print(name, file=answers, flush=True)


if __name__ == "__main__":
    main()
