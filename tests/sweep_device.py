"""Runs PyTorch's operator samples (OpInfo) on the device against the CPU, and prints what differs.

    python -m tests.sweep_device                                   forward, float32, every sample
    python -m tests.sweep_device --kind backward --limit 4         some of the gradients
    python -m tests.sweep_device --dtype int64,bool,float16 --workers 2
    python -m tests.sweep_device --kind all linalg.norm add        these operators, in every way

Operators run in worker processes, so that one that kills its process is counted as a crash.
``python -m tests.coverage`` makes docs/operators.md from such a run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

KINDS = ("forward", "backward", "compiled", "dynamic", "inplace", "out", "errors")
OUTCOMES = ("passed", "recompiled", "wrong", "error", "skipped", "crash")


FAILURES = ("wrong", "error", "crash")

# A worker keeps all that it has compiled; a larger one is replaced.
_MOST_NBYTES = 3 << 30

Request = dict[str, Any]
"""An operator's name, kind, dtype, and how many samples at most."""

Result = dict[str, Any]
"""Counts of outcomes and of ATen operators on the host, descriptions of failures, seconds."""


def label_of(request: Request) -> str:
    """What a request is about."""
    return f"{request['op']} {request['kind']} {request['dtype']}"


@dataclass
class Totals:
    """What happened to each sample, and which ATen operators ran on the host."""

    by_op: dict[str, Counter[str]] = field(default_factory=dict)
    fallbacks: Counter[str] = field(default_factory=Counter)
    plans: int = 0

    def add(self, request: Request, result: Result) -> None:
        counts = self.by_op.setdefault(request["op"], Counter())
        counts.update(result["outcomes"])
        counts["calls on the host"] += sum(result["fallbacks"].values())
        self.fallbacks.update(result["fallbacks"])
        self.plans += result["plans"]

    @property
    def outcomes(self) -> Counter[str]:
        """Samples of all operators."""
        return sum(self.by_op.values(), Counter())

    @property
    def failed(self) -> int:
        """How many samples are not right."""
        outcomes = self.outcomes
        return sum(outcomes[name] for name in FAILURES)

    def print(self, seconds: float, *, hosted: bool) -> None:
        """Prints the sums; with `hosted`, each operator's and what ran on the host before them."""
        if hosted:
            for name, counts in sorted(self.by_op.items()):
                print(f"{name}:", ", ".join(f"{n} {what}" for what, n in counts.items() if n))
            for op, calls in sorted(self.fallbacks.items(), key=lambda item: -item[1]):
                print(f"on the host {calls:6} times: {op}")
        outcomes = self.outcomes
        print(", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES))
        calls = sum(self.fallbacks.values())
        print(f"{len(self.fallbacks)} ATen operators ran on the host, {calls} times")
        print(f"{self.plans} plans compiled, {seconds:.0f} s")


# ---- in the worker


def serve() -> None:
    """Reads one request a line, writes one result a line."""
    import torch  # noqa: F401

    from torch_webgpu_compile.device.autoload import register

    register()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what operators print is not a result
    for line in sys.stdin:
        results.write(json.dumps(_run(json.loads(line))) + "\n")
        results.flush()


def _run(request: Request) -> Result:
    import warnings

    import torch

    from tests import device_dynamic, device_kinds, device_samples
    from torch_webgpu_compile import counters
    from torch_webgpu_compile.fallbacks import FallbackWarning

    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", ".*please report this", FallbackWarning)
    info = device_samples.OPERATORS[request["op"]]
    dtype = getattr(torch, request["dtype"])
    label, start = label_of(request), time.monotonic()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    counters.reset()
    for check in device_samples.checks(info, request["kind"], dtype, request["limit"]):
        try:
            check.run()
            outcomes["passed"] += 1
        except device_kinds.Skip:
            outcomes["skipped"] += 1
        except device_dynamic.Recompiled:
            outcomes["recompiled"] += 1
        except AssertionError as error:
            outcomes["wrong"] += 1
            failures.append(f"WRONG {label} {check.label}: {_text(error)}")
        except Exception as error:
            outcomes["error"] += 1
            failures.append(f"ERROR {label} {check.label}: {type(error).__name__}: {_text(error)}")
    return {
        "outcomes": outcomes,
        "failures": failures,
        "fallbacks": dict(counters.fallbacks),
        "plans": counters.plans_compiled,
        "seconds": time.monotonic() - start,
        "peak_nbytes": _peak_nbytes(),
    }


def _peak_nbytes() -> int:
    """The most memory that this process has had; 0 where it is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---- in the parent


class Worker:
    """A process that runs operators; started again after a crash."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: Request) -> Result:
        """The result of a request, or a crash."""
        process, start = self._process or self._start(), time.monotonic()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            result = dict(json.loads(line))
            if result["peak_nbytes"] > _MOST_NBYTES:
                self.close()
            return result
        self._process = None
        failures = [f"CRASH {label_of(request)}: exit status {process.wait()}"]
        return {
            "outcomes": {"crash": 1},
            "failures": failures,
            "fallbacks": {},
            "plans": 0,
            "seconds": time.monotonic() - start,
        }

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.sweep_device", "--serve"]
        # Processes share the cores: threads of each, PyTorch's and Mesa's, would only contend.
        env = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        return self._process


def run_requests(
    requests: Sequence[Request], workers: int, timeout: float
) -> Iterator[tuple[Request, Result]]:
    """The results of requests, in the order in which worker processes finish them.

    Args:
        timeout: seconds for one request; a worker that takes longer is killed, which is a crash.
    """
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    done: queue.SimpleQueue[tuple[Request, Result]] = queue.SimpleQueue()

    def work() -> None:
        worker = Worker(timeout)
        with suppress(queue.Empty):
            while True:
                request = waiting.get_nowait()
                done.put((request, worker.ask(request)))
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for _ in requests:
        yield done.get()
    for thread in threads:
        thread.join()


def make_requests(
    kinds: Sequence[str], dtypes: Sequence[str], names: Sequence[str] = (), limit: int | None = None
) -> list[Request]:
    """One request for each operator, kind and dtype.

    Args:
        names: of OpInfos; all of them if empty.
        limit: samples of each.
    """
    from tests import device_samples

    unknown = sorted(set(names) - set(device_samples.OPERATORS))
    if unknown:
        raise SystemExit(f"no such operators: {', '.join(unknown)}")
    return [
        {"op": name, "kind": kind, "dtype": dtype, "limit": limit}
        for name in names or device_samples.OPERATORS
        for kind in kinds
        for dtype in dtypes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help="names of OpInfos; all of them by default")
    parser.add_argument("--kind", default="forward", help="all, or of " + ", ".join(KINDS))
    parser.add_argument("--dtype", default="float32", help="separated by commas")
    parser.add_argument("--limit", type=int, help="samples of each operator")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one operator")
    parser.add_argument(
        "--hosted", action="store_true", help="list operators, and what ran on the host"
    )
    parser.add_argument("--verbose", action="store_true", help="print each operator")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    kinds = KINDS if options.kind == "all" else options.kind.split(",")
    requests = make_requests(kinds, options.dtype.split(","), options.ops, options.limit)
    totals, start = Totals(), time.monotonic()
    for request, result in run_requests(requests, options.workers, options.timeout):
        totals.add(request, result)
        for failure in result["failures"]:
            print(failure, flush=True)
        if options.verbose:
            counts, seconds = dict(result["outcomes"]), result["seconds"]
            print(f"{label_of(request)} {counts} {seconds:.1f} s", flush=True)
    totals.print(time.monotonic() - start, hosted=options.hosted)
    raise SystemExit(1 if totals.failed else 0)


if __name__ == "__main__":
    main()
