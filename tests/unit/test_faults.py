"""The table of seeded faults fits the sources, and outcomes of runs are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_table import FAULTS, PACKAGE, Fault
from tests.faults import ERROR, NOT_FOUND, TIME_LIMIT, outcome

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_made(fault: Fault) -> None:
    """Its text is in its file once, and its tests are files of the repository."""
    text = (ROOT / PACKAGE / fault.path).read_text()
    assert text.count(fault.old) == 1
    if fault.path.endswith(".py"):
        compile(text.replace(fault.old, fault.new), fault.path, "exec")
    assert fault.tests
    assert all((ROOT / test).exists() for test in fault.tests)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    file = tmp_path / PACKAGE / "ir/text.py"
    file.parent.mkdir(parents=True)
    fault = Fault("doubled", "ir/text.py", "x = 1", "x = 2", ("tests",))
    for text, count in (("y = 1", 0), ("x = 1\nx = 1", 2)):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"'x = 1' {count} times"):
            fault.make(tmp_path)
    file.write_text("x = 1\n")
    fault.make(tmp_path)
    assert file.read_text() == "x = 2\n"


@pytest.mark.parametrize(
    ("status", "output", "wanted"),
    [
        (0, "", NOT_FOUND),
        (5, "", NOT_FOUND),
        (None, "", TIME_LIMIT),
        (1, "FAILED tests/a.py::test_b[c] - AssertionError: 1 - 2", "tests/a.py::test_b[c]"),
        (1, "ERROR tests/a.py::test_b - ValueError", "tests/a.py::test_b"),
        (2, "ERROR tests/a.py - SyntaxError", ERROR),
        (4, "", ERROR),
        (-6, "", "(the process ended: SIGABRT)"),
    ],
)
def test_outcomes(status: int | None, output: str, wanted: str) -> None:
    assert outcome(status, output) == wanted
