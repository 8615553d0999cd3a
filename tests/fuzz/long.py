"""A long run of random graphs in subprocesses; needs PyTorch and the package, not Hypothesis.

    python -m tests.fuzz.long --graphs 20000 --workers 2 --seed 0

Graph k of a seed is the same for every number of workers. A worker that crashes, or takes longer
than ``--limit`` seconds over one graph, fails that graph and is started again behind it. Prints
each failure with the program's text and the command that runs it alone, and the numbers of graphs,
failures and seconds (also on the way, to stderr). Programs that PyTorch itself refuses, cannot
trace or gets wrong are printed and counted apart. Exit status: 0 without failures, otherwise 1.
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
import warnings
from dataclasses import dataclass, field
from typing import Any

_CHUNK = 100  # graphs of one process, so that what it keeps does not grow for hours
_PROBLEM, _OF_PYTORCH = "problem", "of_pytorch"


@dataclass
class Tally:
    """What all workers have found."""

    checked: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    of_pytorch: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def text(self, seconds: float) -> str:
        """One line."""
        apart = f" (and {self.of_pytorch} of PyTorch's own)" if self.of_pytorch else ""
        return f"{self.checked} graphs, {len(self.failures)} failures{apart}, {seconds:.0f} s"

    def count(self) -> None:
        """One graph more."""
        with self.lock:
            self.checked += 1

    def fail(
        self, arguments: argparse.Namespace, graph: int, text: str, *, of_pytorch: bool = False
    ) -> None:
        """Keeps and prints a failure; one of PyTorch's own is only counted."""
        again = f"python -m tests.fuzz.long --seed {arguments.seed} --first {graph} --graphs 1"
        for name in ("family", "dynamic"):
            chosen = getattr(arguments, name)
            again += f" --{name} {chosen}" if chosen else ""
        with self.lock:
            if of_pytorch:
                self.of_pytorch += 1
            else:
                self.failures.append((graph, text))
            whose = " (PyTorch)" if of_pytorch else ""
            print(f"--- graph {graph}{whose}: {text.rstrip()}\nagain: {again}\n", flush=True)


def check_graphs(arguments: argparse.Namespace) -> None:
    """A worker: one line of JSON before and after each graph."""
    import torch

    from .choosers import RandomChooser
    from .families import draw_program
    from .pipelines import PyTorchFault, check_program

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for graph in range(arguments.first, arguments.first + arguments.graphs):
        _say(start=graph)
        program: Any = "(while the program was drawn)"
        problem, of_pytorch = "", False
        try:
            program = draw_program(RandomChooser(f"{arguments.seed}/{graph}"), arguments.family)
            dynamic = {"always": True, "never": False, "": graph % 3 == 2}[arguments.dynamic]
            check_program(program, dynamic=dynamic, kernels=not arguments.interpreter)
        except AssertionError as error:
            problem = str(error)
            if repr(program) not in problem:
                problem += f"\n{program!r}"
        except Exception as error:
            of_pytorch = isinstance(error, PyTorchFault)
            problem = f"{type(error).__name__}: {error}\n{program!r}"
        _say(end=graph, **({_PROBLEM: problem, _OF_PYTORCH: of_pytorch} if problem else {}))


def _say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def run_range(arguments: argparse.Namespace, first: int, graphs: int, tally: Tally) -> None:
    """Runs graphs in subprocesses until each is checked or failed."""
    end = first + graphs
    while first < end:
        reached, cause = _run_worker(arguments, first, end - first, tally)
        if cause:
            tally.fail(arguments, reached, cause)
        elif reached < end - 1:
            raise RuntimeError(f"a worker stopped behind graph {reached} without a cause")
        first = reached + 1


def _run_worker(
    arguments: argparse.Namespace, first: int, graphs: int, tally: Tally
) -> tuple[int, str]:
    """One subprocess; the last graph it began, and why it ended too early, if it did."""
    command = [sys.executable, "-m", "tests.fuzz.long", "--worker", "--first", str(first)]
    command += ["--graphs", str(graphs), "--seed", str(arguments.seed)]
    command += ["--family", arguments.family] if arguments.family else []
    command += ["--dynamic", arguments.dynamic] if arguments.dynamic else []
    command += ["--interpreter"] if arguments.interpreter else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors: list[str] = []
    lines: queue.Queue[str | None] = queue.Queue()

    def read_events(stream: Any) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    def read_errors(stream: Any) -> None:
        errors.append(stream.read())

    readers = [
        threading.Thread(target=read_events, args=(process.stdout,)),
        threading.Thread(target=read_errors, args=(process.stderr,)),
    ]
    for reader in readers:
        reader.start()
    at, running, cause = first, True, ""
    while True:
        try:
            line = lines.get(timeout=arguments.limit)
        except queue.Empty:
            process.kill()
            cause = f"no answer for {arguments.limit} s"
            break
        if line is None:
            break
        event = json.loads(line) if line.startswith("{") else {}
        if "start" in event:
            at, running = event["start"], True
        elif "end" in event:
            running = False
            tally.count()
            if _PROBLEM in event:
                of_pytorch = event.get(_OF_PYTORCH, False)
                tally.fail(arguments, at, event[_PROBLEM], of_pytorch=of_pytorch)
    status = process.wait()
    for reader in readers:
        reader.join()
    if not cause and (running or status):
        when = "during" if running else "behind"
        cause = f"the worker ended {when} it with status {status}\n{''.join(errors)[-2000:]}"
    if running:
        tally.count()
    return at, cause


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", default="", help="draw half of the calls from this family")
    parser.add_argument("--dynamic", choices=("always", "never"), default="", help="symbolic sizes")
    parser.add_argument("--interpreter", action="store_true", help="do not run kernels")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one graph")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        check_graphs(arguments)
        return 0
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    begun = time.monotonic()
    tally, ranges = Tally(), queue.Queue[tuple[int, int]]()
    end = arguments.first + arguments.graphs
    for first in range(arguments.first, end, _CHUNK):
        ranges.put((first, min(_CHUNK, end - first)))

    def work() -> None:
        while True:
            try:
                first, graphs = ranges.get_nowait()
            except queue.Empty:
                return
            run_range(arguments, first, graphs, tally)
            print(tally.text(time.monotonic() - begun), file=sys.stderr, flush=True)

    workers = [threading.Thread(target=work) for _ in range(arguments.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - begun
    print(tally.text(seconds))
    return 1 if tally.failures or tally.checked != arguments.graphs else 0


if __name__ == "__main__":
    sys.exit(main())
