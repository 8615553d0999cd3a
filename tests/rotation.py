"""Which share of the rotating tests a run takes: another one with every commit.

A test marked ``rotates(n)`` runs with every n-th commit, so that n commits together run all of it;
the cases of a function are spread evenly over them. In a file that rotates, ``rotates(1)`` marks a
test that runs each time, as no other one finds its fault (`tests.faults`). ``--every-case``
(``scripts/nightly``) runs all of them, and so does naming tests: a file's path with ``::``, ``-k``
or ``-m``. With ``--one-of 16`` all tests take turns, and those that rotate 16 times as slowly.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def turn() -> int:
    """The number of commits so far; ``TESTS_TURN`` where it is set, 0 without git's history."""
    chosen = os.environ.get("TESTS_TURN")
    if chosen is not None:
        return int(chosen)
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, check=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout)


def mixed(key: str) -> int:
    """A number that depends on ``key`` alone, the same in every process."""
    return zlib.crc32(key.encode())


def picked(key: str, choices: Sequence[T]) -> T:
    """One of ``choices``: for one key another with each turn, in one turn spread over the keys."""
    return choices[(mixed(key) + turn()) % len(choices)]


def resting(items: Iterable[Any], one_of: int = 1) -> set[Any]:
    """Those of pytest's items whose turn it is not.

    Args:
        one_of: a run takes one of so many shares of what it would take otherwise.
    """
    families: dict[tuple[str, int], list[Any]] = {}
    for item in items:
        marker = item.get_closest_marker("rotates")
        shares = one_of * (1 if marker is None else marker.args[0])
        families.setdefault((item.nodeid.partition("::")[0], shares), []).append(item)
    left = set()
    for (path, shares), members in families.items():
        # Functions stay together, so that each turn has some of every function's cases.
        members.sort(key=lambda item: (item.originalname, mixed(item.nodeid)))
        first = mixed(path) + turn()  # not the first test of every file in the same turn
        left |= {item for k, item in enumerate(members) if (k + first) % shares != 0}
    return left
