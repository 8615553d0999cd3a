"""Options of the whole test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests import rotation


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites committed texts, ``--every-case`` leaves nothing out."""
    golden = "rewrite tests/golden/*.txt and the texts in docs/architecture.md"
    parser.addoption("--update-golden", action="store_true", help=golden)
    every = "run all cases of the tests that run in turn, see tests/rotation.py"
    parser.addoption("--every-case", action="store_true", help=every)
    one_of = "run one of so many shares of all tests, another one with every commit"
    parser.addoption("--one-of", type=int, default=1, metavar="SHARES", help=one_of)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests whose turn it is not, unless they were asked for."""
    named = config.option.keyword or config.option.markexpr or any("::" in a for a in config.args)
    if config.option.every_case or named:
        return
    resting = rotation.resting(items, config.option.one_of)
    if resting:
        config.hook.pytest_deselected(items=list(resting))
        items[:] = [item for item in items if item not in resting]


@pytest.fixture
def fresh() -> None:
    """Nothing compiled or counted before, random numbers from the start."""
    from torch_webgpu_compile import counters

    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.reset()


@pytest.fixture
def captured(fresh: None) -> Iterator[None]:
    """Dynamo puts into a graph what depends on data, as far as it can."""
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.fixture(scope="session")
def every_case(pytestconfig: pytest.Config) -> bool:
    """Whether a test should run all of its cases, not only those whose turn it is."""
    return bool(pytestconfig.getoption("--every-case"))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
