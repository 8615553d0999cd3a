"""Gives cases to a worker process, and starts another one when it crashed, hung or lost its GPU."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

LIMITS = "limits"
MACHINE = "machine"
BUILD = "build"
WORK = "work"
"""Next to a case's systems: the bytes and operations that it cannot do without."""
SYSTEMS = (
    "webgpu",
    "autotuned",
    "eager",
    "inductor",
    "cudagraphs",
    "onnxruntime_webgpu",
    "tinygrad_webgpu",
    "wgpu",
    "wgpudawn",
)
_START_S = 180.0  # imports, on a busy machine


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        small: sizes for a CPU or a software adapter.
        budget_s: seconds for each timing.
        thorough: also what no goal asks for: transfers, a second compilation.
    """

    small: bool
    budget_s: float
    thorough: bool


class WorkerFailure(Exception):
    """The process ended, or gave no answer in time."""


class Runner:
    """Measures cases. A context manager: it owns a process and a folder.

    Args:
        timeout_s: for each case.
        fresh: a process for each case, so that its first call is a cold one.
        inductor_cache: keeps Inductor's kernels between runs; None: as if it had never run.
        variables: of the process's environment, besides those of this one.
    """

    def __init__(
        self,
        settings: Settings,
        timeout_s: float,
        fresh: bool = False,
        inductor_cache: Path | None = None,
        command: Iterable[str] = (sys.executable, "-m", "benchmarks.worker"),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.settings = settings
        self.timeout_s = timeout_s
        self.fresh = fresh
        self.inductor_cache = inductor_cache
        self.command = tuple(command)
        self.variables = dict(variables)
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()
        self._folder.cleanup()

    def machine(self) -> dict[str, Any]:
        """See `worker.machine`; measured by the worker, which has everything loaded."""
        found = self.measure(MACHINE, [MACHINE])[MACHINE]
        if self.fresh:
            self.stop()  # it has opened the GPU
        return found

    def limits(self) -> dict[str, Any]:
        """See `limits.measure`; empty when that failed."""
        found = self.measure(LIMITS, [LIMITS])[LIMITS]
        return {} if "error" in found else found

    def measure(self, case: str, systems: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Results by system, and `WORK`; a system that failed has ``{"error": …}``.

        After a crash the other systems are measured by the next worker.
        """
        results: dict[str, dict[str, Any]] = {}
        remaining = list(systems)
        deadline = time.perf_counter() + self.timeout_s + (_START_S if not self._process else 0)
        while remaining:
            is_complete = self._attempt(case, remaining, results, deadline)
            remaining = [system for system in remaining if system not in results]
            is_late = time.perf_counter() >= deadline
            if is_complete or is_late or "error" in results.get(BUILD, {}):
                break
        built = results.pop(BUILD, {})
        for system in remaining:
            results[system] = built if "error" in built else {"error": "there was no time left"}
        if "error" not in built:
            results[WORK] = built
        if self.fresh and case not in (MACHINE, LIMITS):
            self.stop()
        return results

    def _attempt(
        self,
        case: str,
        systems: list[str],
        results: dict[str, dict[str, Any]],
        deadline: float,
    ) -> bool:
        """Adds to ``results``; False when the worker was lost on the way, which ends it."""
        at = BUILD
        try:
            if self._process is None:
                self._start()
            self._send({"case": case, "systems": systems})
            while "done" not in (answer := self._answer(deadline)):
                if "starting" in answer:
                    at = answer["starting"]
                else:
                    results[answer["system"]] = answer["result"]
        except WorkerFailure as failure:
            self._kill()
            results[at] = {"error": str(failure)}
            return False
        if not answer["usable"]:
            self.stop()
        return bool(answer["usable"])

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailure(f"the process is gone: {error}") from error

    def _answer(self, deadline: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            raise WorkerFailure(f"no result after {self.timeout_s:.0f} s") from None
        if line is None:
            assert self._process is not None
            raise WorkerFailure(f"the process ended with {self._process.wait()}")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _start(self) -> None:
        answers: queue.Queue[str | None] = queue.Queue()
        self._answers = answers
        command = [*self.command, json.dumps(asdict(self.settings))]
        process = self._process = subprocess.Popen(
            command,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

        def read() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    answers.put(line)
            answers.put(None)

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        while "ready" not in self._answer(time.perf_counter() + _START_S):
            pass

    def _environment(self) -> dict[str, str]:
        """Cold means cold: no kernels of an earlier run from a cache of this package, of the driver
        or of Inductor."""
        inductor = self.inductor_cache or Path(self._folder.name) / "inductor"
        return os.environ | {
            "__GL_SHADER_DISK_CACHE": "0",
            "MESA_SHADER_CACHE_DISABLE": "true",
            "TORCHINDUCTOR_CACHE_DIR": str(inductor),
            "TORCH_WEBGPU_CACHE": "0",
            "HF_HUB_OFFLINE": "1",
            **self.variables,
        }

    def stop(self) -> None:
        """Ends the worker, if there is one."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            process.stdin.close()
            process.wait(timeout=10)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if hasattr(os, "killpg"):
            with suppress(ProcessLookupError):  # it and what it has started
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        with suppress(OSError):
            process.stdin.close()
        if self._reader is not None:
            self._reader.join(timeout=5)
