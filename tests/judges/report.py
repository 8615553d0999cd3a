"""What failed here alone, by cause, as a page."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .running import End, is_wanted, load, path_of
from .suites import SUITES

CAUSES = Path(__file__).parent / "causes.toml"
PAGE = Path(__file__).parents[2] / "docs" / "judges.md"
STATES = ("open", "justified")


@dataclass(frozen=True)
class Cause:
    """Why tests fail here: those whose name and message match `pattern`."""

    name: str
    pattern: re.Pattern[str]
    state: str
    """"open", if it is a fault of this package, or "justified"."""
    reason: str


def causes(path: Path = CAUSES) -> list[Cause]:
    """The rows of the file; of several that match, the first counts."""
    rows = tomllib.loads(path.read_text())["cause"]
    found = [Cause(r["name"], re.compile(r["match"], re.S), r["state"], r["reason"]) for r in rows]
    for cause in found:
        if cause.state not in STATES:
            raise ValueError(f"{cause.name}: the state {cause.state!r} is none of {STATES}")
    return found


UNKNOWN = Cause("unknown", re.compile(""), "open", "not looked at yet")


def cause_of(name: str, end: End, rows: Iterable[Cause]) -> Cause:
    """The first cause that matches, or `UNKNOWN`."""
    text = f"{name}\n{end.outcome}\n{end.message}"
    return next((cause for cause in rows if cause.pattern.search(text)), UNKNOWN)


@dataclass(frozen=True)
class Judged:
    """One file: how many tests it has, how many of a share passed, and which failed here alone.

    Tests that were not done in time are only counted: their first calls compile kernels, for which
    drivers take seconds.
    """

    file: str
    total: int
    tried: int
    on_cpu: int
    on_both: int
    late: int
    failed: Mapping[str, End]
    places: frozenset[str]

    @property
    def compared(self) -> int:
        """How many ended on both: the time may have been over before."""
        return self.on_both + len(self.failed)


def judge(results: Path, suite: str, file: str) -> Judged | None:
    """Compares the two devices; a test that the device skips is in neither count."""
    reference = load(path_of(results, suite, file, "reference"))
    if not reference.ends:
        return None
    passed = {name for name, end in reference.ends.items() if end.is_right}
    wanted = {name for name, end in reference.ends.items() if is_wanted(SUITES[suite], end)}
    subject = load(path_of(results, suite, file, "subject"))
    ends = {name: end for name, end in subject.ends.items() if end.outcome != "too long"}
    late = len(subject.ends) - len(ends)
    both = sum(ends[name].is_right for name in wanted if name in ends)
    failed = {
        name: end
        for name, end in ends.items()
        if name in wanted and not end.is_right and end.outcome != "skipped"
    }
    tried = len(reference.ends)
    return Judged(file, reference.total, tried, len(passed), both, late, failed, subject.places)


def files_of(results: Path, suite: str) -> list[str]:
    """The files of a suite that have been tried, in the suite's order."""
    return [f for f in SUITES[suite].files if path_of(results, suite, f, "reference").exists()]


def page(results: Path) -> str:
    """The text of docs/judges.md."""
    rows = causes()
    lines = [
        "# Tests that others wrote",
        "",
        "For everyone who asks whether programs written for other devices run here: this page",
        "answers which tests of PyTorch and of libraries pass on the device, and why others",
        "do not.",
        "",
        "A random share of each suite, run on the CPU, and what passed there on the device",
        "`webgpu`. Made by `python -m tests.judges`; do not edit. What is skipped on the device is",
        "not counted as compared; what the CPU alone skips, as it is no accelerator, is. A test",
        "that was not done in time is late: each signature's first call compiles kernels.",
    ]
    found: Counter[Cause] = Counter()
    for key, suite in SUITES.items():
        judged = [j for file in files_of(results, key) if (j := judge(results, key, file))]
        if not judged:
            continue
        places = sorted({place for j in judged for place in j.places})
        lines += ["", f"## {suite.title}", "", *(f"{place}." for place in places), ""]
        lines += [
            "| file | tests | tried | passed on the CPU | late | compared | passed on both |"
            " failed here alone, by cause |",
            "|---" * 8 + "|",
        ]
        justified = 0
        for j in judged:
            by_cause = Counter(cause_of(name, end, rows) for name, end in j.failed.items())
            found += by_cause
            why = "; ".join(f"{n} {cause.name}" for cause, n in by_cause.most_common())
            cells = (j.file, j.total, j.tried, j.on_cpu, j.late, j.compared, j.on_both, why)
            justified += sum(n for cause, n in by_cause.items() if cause.state == "justified")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        both, compared = sum(j.on_both for j in judged), sum(j.compared for j in judged)
        judgeable = max(compared - justified, 1)
        lines += [
            "",
            f"{both} of {compared} that pass on the CPU pass here; {justified} fail for a reason."
            f" Of the others {both / judgeable:.2%} pass.",
        ]
    lines += ["", "## Causes", "", "| cause | tests | state | reason |", "|---|---|---|---|"]
    for cause in [*rows, UNKNOWN]:
        if found[cause]:
            lines.append(f"| {cause.name} | {found[cause]} | {cause.state} | {cause.reason} |")
    return "\n".join(lines) + "\n"


def described(name: str, end: End) -> str:
    """A failure in one line."""
    errors = [line[1:].strip() for line in end.message.splitlines() if line.startswith("E ")]
    errors = errors or end.message.splitlines()[-2:]
    test = name.split("::", 1)[-1]
    return f"{test} [{end.outcome}, {end.seconds:.1f} s] {' / '.join(errors[:3])[:400]}"
