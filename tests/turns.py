"""The pytest plugin of turns: leaves out the tests whose turn it is not, and keeps the ledger.

A test takes turns if it is marked ``rotates(n)`` or takes long (`tests.durations`). Naming tests
leaves out none of them: a file, ``path::name``, ``-k`` or ``-m``; so does ``--every-case``. Folders
take turns, and so do names with ``--in-turn``. ``--one-of 16`` has all tests take turns: one marked
``rotates(n)`` runs in one of ``max(n, 16)``.
``--changed`` runs what depends on a change (`tests.changed`), and little of the rest.

Only the process that started the run reads and writes the ledger (`tests.ledger`): xdist's workers
get what it read, so that all of them choose the same tests.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import changed, durations, rotation
from tests.ledger import Ledger, Outcome, path_from_environment
from tests.rotation import NEVER, Case, Past

_WRITTEN_EACH_SECONDS = 10  # what a run that is killed loses
_REST = 96  # of what does not depend on a change, one test of so many
_REST_SECONDS = 30.0  # that it has for itself
_CHANGED_SECONDS = 90.0
_UNKNOWN_SECONDS = 0.3  # of a test that has not run yet
_NO_TIME = "no time was left (--stop-after)"


@dataclass
class Plan:
    """What a run's choice depends on; the same in all of its processes.

    Attributes:
        turn: of the run.
        past: of the tests, by node id.
        near: test files that depend on a change, and operators in brackets, the nearest first;
            None without ``--changed``.
        seconds: that all tests may take in a worker, or those near a change; None if all shall run.
    """

    turn: int
    past: Mapping[str, Past] = field(default_factory=dict)
    near: Sequence[str] | None = None
    seconds: float | None = None

    def sent(self) -> dict[str, Any]:
        """As data of the kinds that xdist sends."""
        past = {test: astuple(known) for test, known in self.past.items()}
        return {**vars(self), "past": past, "near": self.near and list(self.near)}

    @classmethod
    def received(cls, sent: Mapping[str, Any]) -> Plan:
        """The inverse of `sent`."""
        return cls(**{**sent, "past": {test: Past(*known) for test, known in sent["past"].items()}})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that say what is left out."""
    group = parser.getgroup("turns", "tests that take turns (tests/turns.py)")
    group.addoption("--every-case", action="store_true", help="leave out nothing")
    in_turn = "take turns in files and tests that are named, too"
    group.addoption("--in-turn", action="store_true", help=in_turn)
    one_of = "run at most one of so many shares of every test"
    group.addoption("--one-of", type=int, metavar="SHARES", help=one_of)
    since = "run what depends on changes since COMMIT (default: since the branch left main)"
    group.addoption("--changed", nargs="?", const="", metavar="COMMIT", help=since)
    ends = "skip what would not be done by then; the oldest come first (with --changed, "
    ends += f"{_CHANGED_SECONDS:.0f} by default, and {_REST_SECONDS:.0f} more for the rest)"
    group.addoption("--stop-after", type=float, metavar="SECONDS", help=ends)


def pytest_configure(config: pytest.Config) -> None:
    """Finds out whose turn it is, or is told by the process that did."""
    if hasattr(config, "workerinput"):
        plan, keeper = Plan.received(config.workerinput["turns"]), None
    else:
        plan, keeper = _planned(config)
    rotation.use_turn(plan.turn)
    config.pluginmanager.register(Turns(config, plan), "turns")
    if keeper is not None:
        config.pluginmanager.register(keeper, "turns-keeper")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Another run in this process has its own turn."""
    rotation.use_turn(None)


def _planned(config: pytest.Config) -> tuple[Plan, Keeper]:
    plan, ledger, title = Plan(rotation.turn_of_commit()), None, "turn {} of the commit"
    path = path_from_environment()
    if path is not None and not config.option.collectonly:
        ledger = Ledger.of(path, os.environ.get("TORCH_WEBGPU_PROVIDER") or "auto")
        try:
            plan = Plan(ledger.begin(plan.turn), ledger.read())
            title = f"turn {{}} of {path}"
        except (OSError, sqlite3.Error) as error:
            title, ledger = f"turn {{}} of the commit; {path} cannot be used: {error}", None
    plan.seconds = config.option.stop_after
    lines = [title.format(plan.turn)]
    if config.option.changed is not None:
        try:
            near = changed.near_tests(config.rootpath, config.option.changed)
        except ValueError as error:
            raise pytest.UsageError(f"--changed: {error}") from error
        plan.near, plan.seconds = [*near.reasons], plan.seconds or _CHANGED_SECONDS
        lines.append(near.summary())
    return plan, Keeper(plan, ledger, lines)


class Turns:
    """Leaves out tests, in each process that collects them."""

    def __init__(self, config: pytest.Config, plan: Plan) -> None:
        self._plan = plan
        option, folder = config.option, config.invocation_params.dir
        self._shares: int | None = option.one_of
        self._all = option.every_case
        in_turn = option.in_turn or option.one_of is not None or plan.near is not None
        asked = [] if in_turn else [argument.partition("::") for argument in config.args]
        by_words = option.keyword or option.markexpr
        self._all_named = not in_turn and (by_words or any(name for _, _, name in asked))
        self._files = {(folder / path).resolve() for path, _, _ in asked}
        self._depending = set[str]()  # on the change
        self._start = 0.0  # of the first test: a busy machine collects for a minute
        self._workers = int(getattr(config, "workerinput", {}).get("workercount", 1))

    def is_named(self, item: pytest.Item | pytest.Module) -> bool:
        """Whether the command line asks for all of a test, or of a file of tests."""
        return bool(self._all or self._all_named or item.path.resolve() in self._files)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out the tests whose turn it is not; those that failed come first."""
        past, near = self._plan.past, self._near_tests(items)
        shares = self._shares or (1 if self._plan.near is None else _REST)
        count = Counter(durations.function_of(item.nodeid) for item in items)
        cases = [
            Case(item.nodeid, _name(item), max(shares, _shares(item, count)))
            for item in items
            if item.nodeid not in near and not self.is_named(item)
        ]
        left = {case.test for case in cases} - rotation.chosen(cases, self._plan.turn, past)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
        self._put_in_order(items, near)
        self._depending = {*near}

    def _near_tests(self, items: Sequence[pytest.Item]) -> list[str]:
        """The tests that depend on a change, as many as there is time for, the nearest first.

        The tests of a file take half of the time that is left, before others have had theirs.
        """
        places: dict[str, list[str]] = {}
        for item in items if self._plan.near else ():
            places.setdefault(item.nodeid.partition("::")[0], []).append(item.nodeid)
            if operator := _operator(item):
                places.setdefault(f"[{operator}]", []).append(item.nodeid)
        expected = {test: self._seconds_of(tests) for tests in places.values() for test in tests}
        found, left = dict[str, None](), (self._plan.seconds or 0) * self._workers
        for part in (0.5, 1.0):
            for place in self._plan.near or ():
                least = (1 - part) * left
                for test in sorted({*places.get(place, ())} - found.keys(), key=self._age):
                    seconds = self._plan.past.get(test, NEVER).seconds or expected[test]
                    if left - seconds < least:
                        break
                    found[test] = None
                    left -= seconds
        return [*found]

    def _seconds_of(self, tests: Sequence[str]) -> float:
        known = [found.seconds for test in tests if (found := self._plan.past.get(test))]
        return statistics.fmean(filter(None, known)) if any(known) else _UNKNOWN_SECONDS

    def _put_in_order(self, items: list[pytest.Item], near: Sequence[str]) -> None:
        """Puts first what failed, and what there may be no time for later."""
        past = self._plan.past
        if self._plan.near is not None:
            places = {test: place for place, test in enumerate(near)}
            items.sort(key=lambda item: places.get(item.nodeid, len(places)))
        elif self._plan.seconds is not None:
            oldest = dict[Path, float]()
            for item in items:
                passed = past.get(item.nodeid, NEVER).passed or 0
                oldest[item.path] = min(passed, oldest.get(item.path, passed))
            items.sort(key=lambda item: oldest[item.path])
        items.sort(key=lambda item: past.get(item.nodeid, NEVER).failed is None)
        if self._plan.near is not None:  # each worker begins with a part of them in a row
            items[:] = [item for k in range(self._workers) for item in items[k :: self._workers]]

    def _age(self, test: str) -> tuple[bool, float, int]:
        known = self._plan.past.get(test, NEVER)
        return known.failed is None, known.passed or 0, rotation.mixed(test)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skips what would not be done in time."""
        self._start = self._start or time.time()
        if self._plan.seconds is None:
            return
        seconds = time.time() - self._start + (self._plan.past.get(item.nodeid, NEVER).seconds or 0)
        has_more = self._plan.near is not None and item.nodeid not in self._depending
        if seconds > self._plan.seconds + (_REST_SECONDS if has_more else 0):
            pytest.skip(_NO_TIME)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test that failed has the turn again in which it did: what it picks is the same."""
        failed = self._plan.past.get(item.nodeid, NEVER).failed
        rotation.use_turn(self._plan.turn if failed is None else failed)
        return (yield)


def _operator(item: pytest.Item) -> str:
    """The last part of the name of the operator whose samples a test runs, if it does."""
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("name") if callspec is not None else None
    return name.rpartition(".")[2] if isinstance(name, str) else ""


def _name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


def _shares(item: pytest.Item, cases: Mapping[str, int]) -> int:
    marker = item.get_closest_marker("rotates")
    marked = 1 if marker is None else int(marker.args[0])
    if marker is not None and marked == 1:
        return 1
    return max(marked, durations.shares(item.nodeid, cases[durations.function_of(item.nodeid)]))


class Keeper:
    """Keeps the ledger, in the process that started the run."""

    def __init__(self, plan: Plan, ledger: Ledger | None, lines: Sequence[str]) -> None:
        self._plan, self._ledger, self._lines = plan, ledger, lines
        self._began = self._written = time.time()
        self._unrun = set[str]()
        self._failed = dict[str, bool]()
        self._seconds = dict[str, float]()
        self._outcomes = dict[str, Outcome]()

    def pytest_report_header(self) -> list[str]:
        """Whose turn it is, and what depends on the change."""
        return [f"turns: {line}" for line in self._lines]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a worker of xdist what it chooses by."""
        node.workerinput["turns"] = self._plan.sent()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes what became of a test; a report of a worker's end is one of a failure alone."""
        test = report.nodeid
        if report.skipped and _NO_TIME in str(report.longrepr):
            self._unrun.add(test)
        self._failed[test] = self._failed.get(test, False) or report.failed
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed or (report.when == "teardown" and test not in self._unrun):
            self._outcomes[test] = Outcome(self._failed[test], self._seconds[test])
        if time.time() - self._written > _WRITTEN_EACH_SECONDS:
            self._write()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Also of a run that is interrupted: what it did not run stays the oldest."""
        self._write()

    def _write(self) -> None:
        outcomes, self._outcomes, self._written = self._outcomes, {}, time.time()
        if self._ledger is None or not outcomes:
            return
        try:
            self._ledger.record(self._plan.turn, self._began, outcomes)
        except sqlite3.Error as error:
            self._ledger = None
            self._lines = [f"the ledger could not be written: {error}"]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Says at the end what a quiet run does not say at its beginning."""
        if config.option.verbose < 0:
            terminalreporter.write_line("\n".join(self.pytest_report_header()))
