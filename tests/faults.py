"""Which seeded faults the tests find: each is a slip in one line of the package.

    python -m tests.faults                           every fault of the table: a quarter of an hour
    python -m tests.faults --list                    the table
    python -m tests.faults --only mean_times_count   these faults
    python -m tests.faults --every-case              with all cases of the tests that rotate
    python -m tests.faults --tests tests             with these tests instead of the fault's own
    python -m tests.faults --workers 8               so many faults at once

For each fault the working tree is copied to a temporary folder, the fault is made there, and pytest
runs there until the first failure, with the files that the table names and the cases whose turn it
is (``tests/rotation.py``). At the end the tests that failed run once more without a fault: a
failure that is there without it says nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import rotation
from tests.fault_table import FAULTS, PACKAGE, Fault

ROOT = Path(__file__).parent.parent
MOST_SECONDS = 600
NOT_FOUND, ERROR, TIME_LIMIT = "NOT FOUND", "ERROR", "TIME LIMIT"
_COLLECTED_WITHOUT_TESTS = 5  # pytest's exit status: it is no one's turn
_running: set[subprocess.Popen[str]] = set()
_TABLE_TEST = "tests/unit/test_faults.py"  # finds every fault, by looking at the sources


@dataclass(frozen=True)
class Result:
    """What came of a fault.

    Attributes:
        found_by: the test that failed first, or `NOT_FOUND`, `ERROR` or `TIME_LIMIT`.
        seconds: that its tests ran.
        output: of pytest, or why it was not run.
    """

    fault: Fault
    found_by: str
    seconds: float
    output: str

    @property
    def is_found(self) -> bool:
        """Whether a test failed."""
        return self.found_by not in (NOT_FOUND, ERROR, TIME_LIMIT)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the working tree, without what git ignores, for as long as the context."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder).resolve()
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():  # one that is deleted, but not committed yet, is not
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        yield copy


def environment_of(copy: Path) -> dict[str, str]:
    """The environment of tests in a copy: it is what is imported, and no plans are kept on disk."""
    return {
        **os.environ,
        "PYTHONPATH": str(copy),
        "TESTS_TURN": str(rotation.turn_of_commit()),
        "TORCH_WEBGPU_CACHE": "0",
    }


def check_import(copy: Path, environment: Mapping[str, str]) -> None:
    """Raises RuntimeError unless the package that is imported in a copy is the copy's."""
    code = f"import importlib.util; print(importlib.util.find_spec({PACKAGE!r}).origin)"
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    origin = Path(found.stdout.strip())
    if found.returncode or not origin.is_relative_to(copy):
        raise RuntimeError(f"{PACKAGE} is imported from {origin}, not from {copy}: {found.stderr}")


def run_tests(copy: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Pytest's exit status in a copy and its output.

    The status is negative for a signal that ended it, None where it took longer than ``seconds``.
    """
    environment = environment_of(copy)
    check_import(copy, environment)
    options = ["-q", "-p", "no:cacheprovider", f"--ignore={_TABLE_TEST}"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        return None, process.communicate()[0]
    finally:
        _running.discard(process)
    return process.returncode, output


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a run of tests, with the processes that they have started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def failures(output: str) -> list[str]:
    """The tests that failed, or in whose fixtures an error was raised."""
    found = re.findall(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", output, re.M)
    return list(map(str.strip, found))


def outcome(status: int | None, output: str) -> str:
    """`Result.found_by` of pytest's exit status and output."""
    if status is None:
        return TIME_LIMIT
    if status in (0, _COLLECTED_WITHOUT_TESTS):
        return NOT_FOUND
    if status < 0:
        return f"(the process ended: {signal.Signals(-status).name})"
    failed = failures(output) if status == 1 else []
    return failed[0] if failed else ERROR  # a fault that stops collection is none to find


def try_fault(fault: Fault, tests: Sequence[str], every_case: bool, seconds: float) -> Result:
    """Makes a fault in a copy of the tree, and runs tests there until one fails."""
    start = time.monotonic()
    with copied_tree() as copy:
        try:
            fault.make(copy)
            cases = "--every-case" if every_case else "--in-turn"
            status, output = run_tests(copy, ["-x", cases, *(tests or fault.tests)], seconds)
        except (RuntimeError, ValueError) as error:
            return Result(fault, ERROR, time.monotonic() - start, str(error))
    return Result(fault, outcome(status, output), time.monotonic() - start, output)


def try_all(faults: Sequence[Fault], given: argparse.Namespace) -> Iterator[Result]:
    """`try_fault` of all, some of them at once; in their order."""

    def try_one(fault: Fault) -> Result:
        return try_fault(fault, given.tests, given.every_case, given.seconds)

    with ThreadPoolExecutor(given.workers) as pool:
        try:
            yield from pool.map(try_one, faults)
        except BaseException:  # Ctrl-C does not reach the tests, which have a session of their own
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                stop(process)
            raise


def failures_without_fault(results: Sequence[Result]) -> list[str]:
    """Of the tests that found faults, those that fail without one; pytest's output if it failed."""
    names = sorted({result.found_by for result in results if "::" in result.found_by})
    if not names:
        return []
    with copied_tree() as copy:
        status, output = run_tests(copy, names, MOST_SECONDS)
    return [] if status == 0 else failures(output) or [output]


def row(result: Result) -> str:
    """A result as a line of the table."""
    fault = result.fault
    return f"{fault.name:48} {fault.stage:10} {result.seconds:5.0f} s  {result.found_by}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if every fault was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--list", action="store_true", help="print the table, run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--tests", nargs="+", default=[], help="pytest's arguments for all faults")
    parser.add_argument("--every-case", action="store_true", help="leave out no case")
    parser.add_argument("--workers", type=int, default=1, help="faults at once")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="per fault at most")
    parser.add_argument(
        "--verbose", action="store_true", help="pytest's output for what is not found"
    )
    given = parser.parse_args(arguments)
    unknown = set(given.only or ()) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no faults are named {', '.join(sorted(unknown))}; see --list")
    faults = [fault for fault in FAULTS if not given.only or fault.name in given.only]
    if given.list:
        for fault in faults:
            print(f"{fault.name:48} {fault.stage:10} {fault.path}\n    {' '.join(fault.tests)}")
        return 0
    results = []
    for result in try_all(faults, given):
        print(row(result), flush=True)
        if given.verbose and not result.is_found:
            print(result.output, flush=True)
        results.append(result)
    found = sum(result.is_found for result in results)
    print(f"{found} of {len(results)} found, turn {rotation.turn_of_commit()}")
    wrong = failures_without_fault(results)
    for name in wrong:
        print(f"fails without a fault too: {name}")
    return 0 if found == len(results) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
