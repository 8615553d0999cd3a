"""Options of the whole test suite."""

from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites the committed texts of ``tests/golden`` and of the docs."""
    help = "rewrite tests/golden/*.txt and the texts in docs/architecture.md"
    parser.addoption("--update-golden", action="store_true", help=help)


@pytest.fixture
def fresh() -> None:
    """Nothing compiled or counted before, random numbers from the start."""
    from torch_webgpu_compile import counters

    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.reset()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
