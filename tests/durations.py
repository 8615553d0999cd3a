"""How long test functions take: what takes long is left to fewer runs.

    python -m tests.durations [LEDGER]     writes durations.json from a ledger (tests/ledger.py)

The record has functions that take more than `MOST_SECONDS`, all of their cases together. Software
adapters' shader caches (``MESA_SHADER_CACHE_DIR``) should be empty before the run whose ledger is
taken, as they are on a fresh machine. A function that it does not have keeps what is recorded.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean

from tests.ledger import Ledger, path_from_environment

RECORD = Path(__file__).with_suffix(".json")
MOST_SECONDS = 1.0
"""That a function may take of each run, on average, on the machine of the record."""


def function_of(test: str) -> str:
    """The function that a test, by its node id, is a case of."""
    return test.partition("[")[0]


@cache
def recorded() -> dict[str, float]:
    """Seconds of a case of test functions, by their node ids."""
    found: dict[str, float] = json.loads(RECORD.read_text())
    return found


def shares(test: str, cases: int) -> int:
    """Of how many runs a test takes part in one, as a case of so many: a power of two.

    So few are the numbers of shares that each has many functions, and runs take equally long.
    """
    seconds = cases * recorded().get(function_of(test), 0.0)
    number = 1
    while seconds > MOST_SECONDS * number:
        number *= 2
    return number


def main(path: Path) -> None:
    """Records what a ledger knows of runs on the default provider."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for test, past in Ledger.of(path, "auto").read().items():
        found[function_of(test)].append(past.seconds or 0.0)
    before = recorded()
    new = {
        name: round(fmean(seconds), 2)
        for name, seconds in found.items()
        if name in before or sum(seconds) > MOST_SECONDS
    }
    RECORD.write_text(json.dumps(before | new, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    given = Path(sys.argv[1]) if sys.argv[1:] else path_from_environment()
    assert given is not None, "name a ledger"
    main(given)
