"""When each test last passed, in a file that outlives a run.

``TESTS_LEDGER`` names the file, for a CI that keeps it between its runs; empty, there is none.
SQLite keeps it whole when runs write at once or are killed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.rotation import Past

_TABLES = """
CREATE TABLE IF NOT EXISTS turns (context TEXT PRIMARY KEY, turn INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tests (
    context TEXT, test TEXT, ran REAL NOT NULL, passed REAL, failed INTEGER, seconds REAL,
    PRIMARY KEY (context, test)
) WITHOUT ROWID;
"""
# A run that began earlier may be written later.
_RECORD = """
INSERT INTO tests (context, test, ran, passed, failed, seconds) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    ran = max(ran, excluded.ran),
    passed = max(coalesce(passed, excluded.passed), coalesce(excluded.passed, passed)),
    failed = CASE WHEN excluded.ran >= ran THEN excluded.failed ELSE failed END,
    seconds = excluded.seconds
"""
_FORGOTTEN_SECONDS = 365 * 24 * 3600  # of tests that are no more
_WAIT_SECONDS = 30  # for another run that writes


@dataclass(frozen=True)
class Outcome:
    """A test that has run. One that was skipped has had its turn: it passed."""

    failed: bool
    seconds: float


def path_from_environment() -> Path | None:
    """Where the ledger is; None if there shall be none, or a turn is given."""
    named = os.environ.get("TESTS_LEDGER")
    if named == "" or "TESTS_TURN" in os.environ:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "torch_webgpu_compile" / "tests.sqlite"


@dataclass(frozen=True)
class Ledger:
    """The part of a ledger that is about one context.

    Attributes:
        context: what tests pass or fail on: what passed on one provider says nothing of another.
    """

    path: Path
    context: str

    @staticmethod
    def of(path: Path, provider: str) -> Ledger:
        """That of runs on a provider (``auto``: what is taken by default) with this PyTorch."""
        return Ledger(path, f"{provider}, torch {version('torch')}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")  # also of those who read first
            yield connection
            connection.execute("COMMIT")
        finally:
            connection.close()  # which undoes what is not committed

    def begin(self, first: int) -> int:
        """A turn of its own for a run: ``first`` in a new ledger.

        Raises:
            OSError, sqlite3.OperationalError: no file can be written there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return self._begin(first)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:  # a file that is something else, or torn
            self.path.unlink()
            return self._begin(first)

    def _begin(self, first: int) -> int:
        with self._transaction() as connection:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            forgotten = time.time() - _FORGOTTEN_SECONDS
            connection.execute("DELETE FROM tests WHERE ran < ?", (forgotten,))
            row = connection.execute(
                "INSERT INTO turns VALUES (?, ?) "
                "ON CONFLICT DO UPDATE SET turn = turn + 1 RETURNING turn",
                (self.context, first),
            ).fetchone()
        return int(row[0])

    def read(self) -> dict[str, Past]:
        """What is known of each test."""
        with self._transaction() as connection:
            rows = connection.execute(
                "SELECT test, passed, failed, seconds FROM tests WHERE context = ?", (self.context,)
            ).fetchall()
        return {test: Past(*row) for test, *row in rows}

    def record(self, turn: int, began: float, outcomes: Mapping[str, Outcome]) -> None:
        """Writes what became of tests.

        Args:
            turn: of the run.
            began: when the run did: its tests are equally old, so that their order says nothing.
        """
        rows = [
            (
                *(self.context, test, began),
                None if outcome.failed else began,
                turn if outcome.failed else None,
                outcome.seconds,
            )
            for test, outcome in outcomes.items()
        ]
        with self._transaction() as connection:
            connection.executemany(_RECORD, rows)
