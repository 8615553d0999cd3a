"""Options of the whole test suite."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

pytest_plugins = ["tests.turns"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden`` rewrites committed texts."""
    golden = "rewrite tests/golden/*.txt and the texts in docs/architecture.md"
    parser.addoption("--update-golden", action="store_true", help=golden)


@pytest.fixture
def fresh() -> None:
    """Nothing compiled or counted before, random numbers from the start."""
    from torch_webgpu_compile import counters

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    counters.reset()


@pytest.fixture
def captured(fresh: None) -> Iterator[None]:
    """Dynamo puts into a graph what depends on data, as far as it can."""
    config = torch._dynamo.config
    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.fixture
def kept_garbage() -> Iterator[None]:
    """Garbage of other tests stays what it is, with its memory and its devices."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def every_case(request: pytest.FixtureRequest) -> bool:
    """Whether a test should run all of its cases, not only those whose turn it is."""
    return bool(request.config.pluginmanager.getplugin("turns").is_named(request.node))


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))
