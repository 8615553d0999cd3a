"""Runs a share of one file of a suite on both devices, in processes that may end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .suites import Side, Suite

PLUGINS = Path(__file__).parent / "plugins"
CASES = Path(__file__).parent / "cases"
"""Tests of this project's own that a suite's checks are run with."""
PASSED = frozenset({"passed", "expected failure"})


@dataclass(frozen=True)
class Share:
    """How much of each file is run."""

    count: int
    seed: int
    limit_s: int
    """Seconds of one test."""
    seconds: float
    """Of one file on one device."""
    match: str = ""


@dataclass(frozen=True)
class End:
    """How a test ended; `outcome` is pytest's, or "too long", "crash" or "none"."""

    outcome: str
    message: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether it passed, or failed as the test says that it does."""
        return self.outcome in PASSED


@dataclass(frozen=True)
class Results:
    """How the tests of a file ended on one device, by their names without it."""

    ends: dict[str, End]
    total: int
    """How many there are."""
    places: frozenset[str] = frozenset()
    """Versions of PyTorch and GPUs, if they were used."""


def path_of(results: Path, suite: str, file: str, side: str) -> Path:
    """Where the JSON lines of a file on one device are; `side` is "reference" or "subject"."""
    return results / suite / f"{file.removesuffix('.py').replace('/', '.')}.{side}.jsonl"


def load(path: Path) -> Results:
    """What a run has written; the last row of a test counts.

    A test that was begun before its process ended is a crash; where the runner itself was stopped,
    it is as if it had not been begun.
    """
    last: dict[str, Any] = {}
    total, places = 0, set[str]()
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        total = max(total, row.get("total", 0))  # a match leaves fewer
        places |= {row["where"]} if "where" in row else set()
        if "name" in row:
            last[row["name"]] = row
        elif "ended" in row:
            for begun in last.values():
                begun["outcome"] = begun["outcome"].replace("begun", "crash")
    ends = {
        name: End(row["outcome"], row.get("message", ""), row.get("s", 0.0))
        for name, row in last.items()
        if row["outcome"] != "begun"
    }
    return Results(ends, total, frozenset(places))


def is_wanted(suite: Suite, end: End) -> bool:
    """Whether a test that ended so on the CPU has to pass on the device."""
    return end.is_right or (suite.skipped_too and end.outcome == "skipped")


def source_of(folder: Path, file: str) -> Path:
    """Where a file of a suite is."""
    return next((path for path in (folder / file, CASES / file) if path.exists()), folder / file)


def forget(path: Path, names: set[str]) -> None:
    """Removes these tests from what a run has written."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text(
            "".join(line for line in lines if json.loads(line).get("name") not in names)
        )


def run_file(folder: Path, results: Path, key: str, suite: Suite, file: str, share: Share) -> None:
    """Runs a share on the CPU, and what passed there on the device; goes on where a run ended."""
    reference = path_of(results, key, file, "reference")
    subject = path_of(results, key, file, "subject")
    reference.parent.mkdir(parents=True, exist_ok=True)
    _run_side(folder, suite, suite.reference, file, share, reference, None)
    passed = [name for name, end in load(reference).ends.items() if is_wanted(suite, end)]
    if passed:
        _run_side(folder, suite, suite.subject, file, share, subject, passed)


def _run_side(
    folder: Path,
    suite: Suite,
    side: Side,
    file: str,
    share: Share,
    results: Path,
    chosen: Sequence[str] | None,
) -> None:
    """Starts processes until all has been run, nothing goes forward, or the time is over."""
    if chosen is not None and not set(chosen) - set(load(results).ends):
        return
    end = time.monotonic() + share.seconds
    while (seconds := end - time.monotonic()) > 0:
        known = list(load(results).ends)
        task = {
            "known": known,
            "results": str(results.absolute()),
            "chosen": chosen,
            "count": share.count,
            "seed": share.seed,
            "match": side.match,
            "neutral": suite.match
            if not share.match
            else f"(?s)(?=.*{suite.match}).*{share.match}",
            "limit_s": share.limit_s,
            "seconds": seconds,
        }
        _start(folder, suite, side, file, task, results)
        ended = [json.loads(line) for line in results.read_text().splitlines()[-2:]]
        if ended[0].get("left") == 0 or len(load(results).ends) == len(known):
            return


def _start(
    folder: Path, suite: Suite, side: Side, file: str, task: dict[str, Any], results: Path
) -> None:
    """Runs pytest in a process group of its own and waits for it, a little longer than it may."""
    log, written = results.with_suffix(".log"), results.with_suffix(".task.json")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--maxfail=1000000"]
    command += ["--continue-on-collection-errors"]  # a file needs a package that is not there
    source = source_of(folder, file).absolute()
    root = CASES if source.parent == CASES else folder
    command += ["-c", os.devnull, "--rootdir", str(root), "--confcutdir", str(root)]
    command += ["-p", "no:cacheprovider"]
    command += ["-p", "share", *(part for name in suite.plugins for part in ("-p", name))]
    command += [*([] if suite.conftest else ["--noconftest"]), *side.arguments, str(source)]
    paths = [str(PLUGINS), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **side.environment,
        "JUDGE": str(written.absolute()),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_WEBGPU_FALLBACK": "silent",  # a test that counts warnings counts its own
        "TORCH_WEBGPU_PROGRESS": "0",
    }
    written.write_text(json.dumps(task))
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(task["seconds"] + 2 * task["limit_s"] + 120)
        except subprocess.TimeoutExpired:
            pass  # the test that was begun is a crash
        finally:  # also what tests have left running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    with results.open("a") as file:
        file.write(json.dumps({"ended": code}) + "\n")
