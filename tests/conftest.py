"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites the committed texts of ``tests/golden``."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/*.txt")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
