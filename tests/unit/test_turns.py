"""Turns of tests, the ledger that they come from, and what a change has in full."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import changed, durations
from tests.ledger import Ledger, Outcome, path_from_environment
from tests.rotation import Case, Past, chosen, share_of
from tests.turns import Plan, Turns

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
TEMPLATES = "torch_webgpu_compile/templates"
PASSED, FAILED = Outcome(False, 0.25), Outcome(True, 0.25)


def family(count: int, shares: int) -> list[Case]:
    return [Case(f"tests/test_a.py::f[{k}]", "f", shares) for k in range(count)]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("shares", [2, 3, 16, 96])
def test_all_shares_come_whatever_lies_between_two_runs(step: int, shares: int) -> None:
    turns = [share_of("key", 700 + step * k, shares) for k in range(10 * shares)]
    assert {*turns} == {*range(shares)}
    if step == 1:
        assert {*turns[: 2 * shares]} == {*range(shares)}


@pytest.mark.parametrize(("count", "shares"), [(40, 1), (40, 3), (40, 16), (3, 9)])
def test_a_run_takes_a_share_and_all_come(count: int, shares: int) -> None:
    cases, ran = family(count, shares), Counter[str]()
    for turn in range(4 * shares):
        found = chosen(cases, turn)
        assert len(found) in (count // shares, -(-count // shares))
        ran.update(found)
    assert ran.keys() == {case.test for case in cases}


@pytest.mark.parametrize(("count", "shares"), [(40, 3), (40, 16), (3, 9)])
def test_those_come_that_passed_longest_ago(count: int, shares: int) -> None:
    """Also when some have run in between, or all at once, and turns were missed."""
    random.seed(0)
    cases = family(count, shares)
    past = {case.test: Past(passed=0.0) for case in cases[: count // 2]}
    waited = Counter[str]()
    for turn in range(0, 12 * shares, 2):
        found, never = chosen(cases, turn, past), {case.test for case in cases} - past.keys()
        assert found <= never or never <= found
        ran = {*found, *(case.test for case in random.sample(cases, turn < 4 * shares))}
        past |= {test: Past(passed=float(turn)) for test in ran}
        waited.update({case.test for case in cases} - ran)
        waited.update({test: -waited[test] for test in ran})
        assert max(waited.values()) <= 2.5 * shares


def test_what_failed_comes_next_and_nothing_is_lost() -> None:
    cases = family(40, 10)
    failed = {case.test for case in cases[10:17]}
    past = {case.test: Past(5.0, 3 if case.test in failed else None) for case in cases}
    assert chosen(cases, 8, past) == failed
    few = {case.test for case in cases[10:12]}
    past = {case.test: Past(5.0, 3 if case.test in few else None) for case in cases}
    found = chosen(cases, 8, past)
    assert few < found
    assert len(found) == 4


def test_what_takes_long_is_left_to_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "recorded", lambda: {"tests/test_a.py::f": 0.4})
    assert durations.MOST_SECONDS == 1.0
    shares = [durations.shares("tests/test_a.py::f[3]", cases) for cases in (1, 2, 3, 20)]
    assert shares == [1, 1, 2, 8]
    assert durations.shares("tests/test_a.py::g[3]", 100) == 1


# ---- the ledger


def test_a_ledger_remembers_by_context(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tests.sqlite"
    ledger, other = Ledger(path, "wgpu"), Ledger(path, "dawn")
    assert [ledger.begin(700), ledger.begin(9), other.begin(30)] == [700, 701, 30]
    ledger.record(700, 10.0, {"a": PASSED, "b": FAILED})
    ledger.record(701, 20.0, {"a": FAILED, "b": PASSED, "c": PASSED})
    # A run that began before that ends after it.
    ledger.record(700, 15.0, {"a": PASSED, "b": FAILED, "c": PASSED})
    assert ledger.read() == {
        "a": Past(15.0, 701, 0.25),
        "b": Past(20.0, None, 0.25),
        "c": Past(20.0, None, 0.25),
    }
    assert other.read() == {}


def test_runs_write_at_once(tmp_path: Path) -> None:
    ledger, turns = Ledger(tmp_path / "tests.sqlite", "wgpu"), []
    ledger.begin(0)

    def run(name: str) -> None:
        turns.append(ledger.begin(0))
        for k in range(10):
            ledger.record(1, time.time(), {f"{name} {k}": PASSED})

    threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turns) == [1, 2, 3, 4]
    assert len(ledger.read()) == 40


def test_a_file_that_is_no_ledger_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tests.sqlite"
    path.write_text("something else" * 100)
    ledger = Ledger(path, "wgpu")
    assert ledger.begin(3) == 3
    assert ledger.read() == {}


def test_where_the_ledger_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTS_TURN", raising=False)
    monkeypatch.delenv("TESTS_LEDGER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert path_from_environment() == Path("/c/torch_webgpu_compile/tests.sqlite")
    monkeypatch.setenv("TESTS_LEDGER", "/d/e")
    assert path_from_environment() == Path("/d/e")
    monkeypatch.setenv("TESTS_LEDGER", "")
    assert path_from_environment() is None
    monkeypatch.setenv("TESTS_LEDGER", "/d/e")
    monkeypatch.setenv("TESTS_TURN", "7")  # a turn that is given is to be the same again
    assert path_from_environment() is None


# ---- pytest

ROTATING = """
import os, pytest
from tests.rotation import turn

@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", range(12))
def test_a(name):
    with open(os.environ["LOG"], "a") as log:
        log.write(f"{name} {turn()}\\n")
    assert str(name) != os.environ.get("FAILS")
"""


@pytest.mark.parametrize("workers", [[], ["-p", "xdist", "-n", "2"]], ids=["alone", "xdist"])
def test_runs_with_a_ledger(
    workers: list[str], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All come in turn; what fails comes next, with the turn in which it failed."""
    monkeypatch.delenv("TESTS_TURN", raising=False)
    monkeypatch.delenv("TORCH_WEBGPU_PROVIDER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TESTS_LEDGER", str(pytester.path / "ledger"))
    log = pytester.path / "log"
    monkeypatch.setenv("LOG", str(log))
    pytester.mkdir("sub")
    (pytester.path / "sub" / "test_file.py").write_text(ROTATING)

    def run(*arguments: str) -> list[list[str]]:
        log.write_text("")
        pytester.runpytest_subprocess("-p", "tests.turns", *workers, *arguments)
        return sorted(line.split() for line in log.read_text().splitlines())

    first, second = run("sub"), run("sub")
    assert len(first) == len(second) == 2
    assert not {name for name, _ in first} & {name for name, _ in second}
    monkeypatch.setenv("FAILS", "7")
    ((_, turn),) = {(name, turn) for name, turn in run("sub/test_file.py") if name == "7"}
    third = dict(run("sub"))
    assert third["7"] == turn
    assert len(third) == 2
    if not workers:
        assert len(run("sub/test_file.py")) == 12
        assert len(run("sub/test_file.py", "--in-turn")) == 2
        past = Ledger(pytester.path / "ledger", "auto, torch " + version("torch")).read()
        assert run("sub", "--every-case", "--stop-after", "-1") == []
        assert Ledger(pytester.path / "ledger", "auto, torch " + version("torch")).read() == past


SOURCE = """
import pytest

@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", ["sort", "linalg.sort", *map(str, range(10))])
def test_a(name): ...

@pytest.mark.parametrize("k", range(60))
def test_b(k): ...
"""


def collected(
    items: Sequence[pytest.Item], arguments: Sequence[str], plan: Plan | None = None, **options: Any
) -> list[str]:
    """The tests that a run takes with arguments and options of the command line."""
    left_out = {
        "every_case": False,
        "in_turn": False,
        "one_of": None,
        "keyword": "",
        "markexpr": "",
    }
    config: Any = SimpleNamespace(
        option=SimpleNamespace(**left_out | options),
        args=arguments,
        invocation_params=SimpleNamespace(dir=items[0].path.parent),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    found = [*items]
    Turns(config, plan or Plan(0)).pytest_collection_modifyitems(config, found)
    return [item.name for item in found]


def test_what_is_named_does_not_rotate(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(SOURCE)
    file = items[0].path.name
    for arguments, options, count in (
        (["."], {}, 62),
        ([file], {}, 72),
        ([f"{file}::test_a"], {}, 72),
        (["."], {"keyword": "test"}, 72),
        (["."], {"markexpr": "not slow"}, 72),
        (["."], {"every_case": True}, 72),
        ([file], {"in_turn": True}, 62),
        (["."], {"one_of": 6}, 12),
        (["."], {"one_of": 3}, 22),  # two of twelve, twenty of sixty: shares are not multiplied
        ([file], {"one_of": 12}, 6),
    ):
        assert len(collected(items, arguments, **options)) == count, (arguments, options)


def test_a_change_has_its_tests_in_full_while_there_is_time(pytester: pytest.Pytester) -> None:
    items = pytester.getitems(SOURCE)
    file = items[0].nodeid.partition("::")[0]
    past = {f"{file}::test_b[{k}]": Past(5.0, seconds=4.0) for k in range(60)}
    near = ["[sort]", file, "tests/test_other.py"]
    assert len(collected(items, [], Plan(0, past, near, seconds=1e6))) == 72
    found = collected(items, [], Plan(0, past, near, seconds=50.0))
    assert {"test_a[sort]", "test_a[linalg.sort]"} <= {*found}
    assert 22 <= len(found) <= 26  # six seconds for twelve tests, four for each of eleven
    assert len(collected(items, [], Plan(0, past, [], seconds=50.0))) <= 2


# ---- what depends on a change


@pytest.mark.rotates(3)
@pytest.mark.parametrize(
    ("files", "nearest", "within"),
    [
        (["tests/unit/test_sizes.py"], ["tests/unit/test_sizes.py"], 1),
        (["tests/harness.py"], ["tests/unit/test_lowering_views.py"], 60),
        (["torch_webgpu_compile/lowering/views.py"], ["tests/unit/test_lowering_views.py"], 60),
        (["torch_webgpu_compile/lowering/sorting.py"], ["[sort]"], 60),
        ([f"{TEMPLATES}/attention.wgsl.jinja"], ["tests/unit/test_attention.py"], 60),
        ([f"{TEMPLATES}/attention_step.wgsl.jinja"], ["tests/unit/test_attention.py"], 60),
        (["web/src/plan.ts"], ["tests/web/test_runtime.py"], 14),
        (["tests/web/conftest.py"], ["tests/web/test_runtime.py"], 8),
        (["LICENSE"], [], 0),
    ],
)  # fmt: skip
def test_near_tests(
    files: list[str], nearest: list[str], within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy of the tree has no list of its files")
    monkeypatch.setattr(changed, "changed_files", lambda *_: ("c0ffee", tuple(files)))
    found = changed.near_tests(ROOT)
    assert {*nearest} <= {*[*found.reasons][:within]}
    assert len(found.reasons) <= within or found.others
    assert found.summary()


def test_a_commit_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no changes since nosuchcommit: "):
        changed.changed_files(ROOT, "nosuchcommit")
