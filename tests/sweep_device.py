"""Runs PyTorch's operator samples (OpInfo) on the device against the CPU, and prints what differs.

    python -m tests.sweep_device                                   forward, float32, every sample
    python -m tests.sweep_device --kind backward --limit 4         some of the gradients
    python -m tests.sweep_device --dtype int64,bool,float16 --shard 0/2
    python -m tests.sweep_device --kind all linalg.norm add        these operators, in every way

Operators run in a process of their own kind, so that one that kills it is counted as a crash.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("passed", "wrong", "error", "skipped", "crash")


@dataclass
class Totals:
    """What happened to each sample, and which ATen operators ran on the host."""

    outcomes: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    plans: int = 0

    def add(self, result: dict[str, Any]) -> None:
        self.outcomes.update(result["outcomes"])
        self.fallbacks.update(result["fallbacks"])
        self.plans += result["plans"]

    def print(self, seconds: float, *, hosted: bool) -> None:
        if hosted:
            for op, calls in sorted(self.fallbacks.items(), key=lambda item: -item[1]):
                print(f"on the host {calls:6} times: {op}")
        print(", ".join(f"{self.outcomes[name]} {name}" for name in OUTCOMES))
        print(f"{len(self.fallbacks)} operators ran on the host, {sum(self.fallbacks.values())} ")
        print(f"times; {self.plans} plans compiled; {seconds:.0f} s")


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


def _run(request: dict[str, Any]) -> dict[str, Any]:
    import warnings

    import torch

    from tests import device_samples
    from torch_webgpu_compile import counters
    from torch_webgpu_compile.fallbacks import FallbackWarning

    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", ".*please report this", FallbackWarning)
    info = device_samples.OPERATORS[request["op"]]
    dtype = getattr(torch, request["dtype"])
    label = f"{request['op']} {request['kind']} {request['dtype']}"
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    counters.reset()
    for check in device_samples.checks(info, request["kind"], dtype, request["limit"]):
        try:
            check.run()
            outcomes["passed"] += 1
        except device_samples.Skip:
            outcomes["skipped"] += 1
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
    }


def _text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ---- in the parent


class Worker:
    """A process that runs operators; started again after a crash."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a request, or a crash."""
        process = self._process or self._start()
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
            return dict(json.loads(line))
        self._process = None
        label = f"CRASH {request['op']} {request['kind']} {request['dtype']}"
        failures = [f"{label}: exit status {process.wait()}"]
        return {"outcomes": {"crash": 1}, "failures": failures, "fallbacks": {}, "plans": 0}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.sweep_device", "--serve"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self._process


def _requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    from tests import device_samples

    kinds = device_samples.KINDS if options.kind == "all" else options.kind.split(",")
    names = [n for n in device_samples.OPERATORS if not options.ops or n in options.ops]
    unknown = sorted(set(options.ops) - set(names))
    if unknown:
        raise SystemExit(f"no such operators: {', '.join(unknown)}")
    shard, count = map(int, options.shard.split("/"))
    return [
        {"op": name, "kind": kind, "dtype": dtype, "limit": options.limit}
        for name in names[shard::count]
        for kind in kinds
        for dtype in options.dtype.split(",")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*", help="names of OpInfos; all of them by default")
    parser.add_argument("--kind", default="forward", help="forward, backward, inplace, out, errors")
    parser.add_argument("--backward", action="store_true", help="the same as --kind backward")
    parser.add_argument("--dtype", default="float32", help="separated by commas")
    parser.add_argument("--limit", type=int, help="samples of each operator")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th operator, from the i-th")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one operator")
    parser.add_argument("--hosted", action="store_true", help="list what ran on the host")
    parser.add_argument("--json", help="a file to which each result is appended as a line")
    parser.add_argument("--verbose", action="store_true", help="print each operator")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.backward:
        options.kind = "backward"
    totals, worker, start = Totals(), Worker(options.timeout), time.monotonic()
    for request in _requests(options):
        begun = time.monotonic()
        result = worker.ask(request)
        totals.add(result)
        if options.json:
            with open(options.json, "a") as lines:
                lines.write(json.dumps(request | result) + "\n")
        for failure in result["failures"]:
            print(failure, flush=True)
        if options.verbose:
            seconds = time.monotonic() - begun
            counts = dict(result["outcomes"])
            print(f"{request['op']} {request['kind']} {counts} {seconds:.1f} s", flush=True)
    worker.close()
    totals.print(time.monotonic() - start, hosted=options.hosted)
    bad = sum(totals.outcomes[name] for name in ("wrong", "error", "crash"))
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
