"""Which tests a run takes of those that take turns.

A test marked ``rotates(n)`` takes part in one run of n, or of more if its function takes long
(`tests.durations`); the cases of a function are spread evenly over the runs. ``rotates(1)`` marks a
test that runs each time, as no other one finds its fault (`tests.faults`). `tests.turns` asks here
with what it knows from the ledger (`tests.ledger`): then a run takes as many as are a share, those
first that passed longest ago. Without a ledger the commit decides.

A turn is a number. The share of a key moves with it by the golden section, not by one: whatever
constant number of turns lies between two runs (pushes of several commits, runs of other folders),
all shares come, evenly. Between runs of each turn, a share of n waits 2 n turns at most.
"""

from __future__ import annotations

import math
import os
import subprocess
import zlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Case:
    """A test that takes turns.

    Attributes:
        test: its node id.
        function: whose case it is.
        shares: it takes part in one run of so many.
    """

    test: str
    function: str
    shares: int

    @property
    def path(self) -> str:
        """The file that the test is in."""
        return self.test.partition("::")[0]


@dataclass(frozen=True)
class Past:
    """What is known of a test.

    Attributes:
        passed: when it last passed, in seconds since 1970; None if it never has.
        failed: the turn in which it failed, if it failed when it last ran.
        seconds: that it took.
    """

    passed: float | None = None
    failed: int | None = None
    seconds: float | None = None


NEVER = Past()


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, check=True, text=True
    )
    return found.stdout.strip()


@cache
def turn_of_commit() -> int:
    """``TESTS_TURN`` where it is set; else a number for HEAD, 0 without git.

    It is the number of steps along first parents, which grows by one with each commit and each
    merge. In a shallow clone, which does not know it, it is drawn by the commit's name: n runs
    then leave out 37% of what is in one share of n, 3 n runs 5%.
    """
    chosen = os.environ.get("TESTS_TURN")
    if chosen is not None:
        return int(chosen)
    try:
        if _git("rev-parse", "--is-shallow-repository") == "true":
            return mixed(_git("rev-parse", "HEAD"))
        return int(_git("rev-list", "--count", "--first-parent", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return 0


_turns: list[int] = []


def use_turn(turn: int | None) -> None:
    """Makes a turn that of `turn` from here on; None: the commit's."""
    _turns[:] = [] if turn is None else [turn]


def turn() -> int:
    """The turn of this run, while a test that failed runs again that in which it did."""
    return _turns[0] if _turns else turn_of_commit()


def mixed(key: str) -> int:
    """A number of 32 bits that depends on ``key`` alone, the same in every process."""
    return zlib.crc32(key.encode())


def share_of(key: str, turn: int, shares: int) -> int:
    """Whose turn it is of ``shares`` shares: for one key another with each turn."""
    angle = (mixed(key) / 2**32 + turn * _GOLDEN) % 1
    return int(angle * shares)


def picked(key: str, choices: Sequence[T]) -> T:
    """One of ``choices``: for one key another with each turn, in one turn spread over the keys."""
    return choices[share_of(key, turn(), len(choices))]


def chosen(cases: Collection[Case], turn: int, past: Mapping[str, Past] | None = None) -> set[str]:
    """The tests whose turn it is, by node id; all that failed when they last ran are among them."""
    past = past or {}
    families: dict[Hashable, list[Case]] = {}
    for case in cases:
        families.setdefault((case.path, case.shares), []).append(case)
    found = set[str]()
    for members in families.values():
        # Functions stay together, so that each turn has some of every function's cases.
        members.sort(key=lambda case: (case.function, mixed(case.test)))
        path, shares = members[0].path, members[0].shares
        # Families of one path do not come in the same turn: those of long tests would take longer.
        first = share_of(f"{path} {shares}", turn, shares)
        waits = {case.test: (k - first) % shares for k, case in enumerate(members)}
        count = sum(wait == 0 for wait in waits.values())

        def age(test: str, waits: Mapping[str, int] = waits) -> tuple[bool, float, int]:
            known = past.get(test, NEVER)
            passed = -math.inf if known.passed is None else known.passed
            return known.failed is None, passed, waits[test]

        failed = sum(past.get(test, NEVER).failed is not None for test in waits)
        found.update(sorted(waits, key=age)[: max(count, failed)])
    return found
