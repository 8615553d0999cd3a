"""Runs a share of a suite that others wrote on the CPU and on the device: docs/judges.md.

    python -m tests.judges FOLDER                        100 tests of each of PyTorch's files
    python -m tests.judges FOLDER test_nn.py --count 0   one file whole
    python -m tests.judges FOLDER --again                what failed here alone, once more
    python -m tests.judges FOLDER --suite kornia         another suite: see tests/judges/suites.py
    python -m tests.judges --report                      the page, of what was run

FOLDER is where the suite's tests are: of PyTorch, ``test/`` of its sources. Its version may differ
from the installed one; what fails on the CPU is not counted. What was run is kept in a folder
(``--results``), so that a run that was stopped goes on, and a larger share adds to a smaller one.
Needs pytest, expecttest and hypothesis.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from . import report, running
from .suites import SUITES


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.judges",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("files", nargs="*", help="of the suite; all by default")
    parser.add_argument("--suite", choices=SUITES, default="device")
    parser.add_argument("--count", type=int, default=100, help="tests of each file; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="another share")
    parser.add_argument("--match", default="", help="only tests whose names match this")
    parser.add_argument("--limit", type=int, default=60, help="seconds of one test")
    parser.add_argument("--minutes", type=float, default=4.0, help="of a file on one device")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "judges-run")
    parser.add_argument("--again", action="store_true", help="what failed here alone, once more")
    parser.add_argument("--report", action="store_true", help="only write the page")
    given = parser.parse_intermixed_args()
    if not given.report:
        if given.folder is None:
            parser.error("the folder with the suite's tests is missing")
        _run(given)
    report.PAGE.write_text(report.page(given.results))


def _run(given: argparse.Namespace) -> None:
    suite = SUITES[given.suite]
    count = given.count or 10**9
    share = running.Share(count, given.seed, given.limit, given.minutes * 60, given.match)
    rows = report.causes()
    for file in given.files or suite.files:
        if not running.source_of(given.folder, file).exists():
            print(f"{file}: not there", flush=True)
            continue
        if given.again:
            judged = report.judge(given.results, given.suite, file)
            names = {n for n in judged.failed if given.match in n} if judged else set()
            if not names:
                continue
            running.forget(running.path_of(given.results, given.suite, file, "subject"), names)
        start = time.monotonic()
        running.run_file(given.folder, given.results, given.suite, suite, file, share)
        judged = report.judge(given.results, given.suite, file)
        if judged is None:
            print(f"{file}: no test ran", flush=True)
            continue
        print(
            f"{file}: {judged.tried} of {judged.total} tried, {judged.on_cpu} pass on the CPU,"
            f" {judged.on_both} of {judged.compared} here, {time.monotonic() - start:.0f} s"
        )
        for name, end in sorted(judged.failed.items()):
            cause = report.cause_of(name, end, rows)
            print(f"  {cause.name}: {report.described(name, end)}", flush=True)


if __name__ == "__main__":
    main()
