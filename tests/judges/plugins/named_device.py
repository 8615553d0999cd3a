"""A pytest plugin: the device of ``JUDGE_DEVICE`` for suites that know only CUDA and a few others.

kornia's conftest.py has a table of devices; torchmetrics' tester has a function that chooses one.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

_DEVICE = os.environ["JUDGE_DEVICE"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Changes what the suite's own conftest.py has loaded by now."""
    for plugin in session.config.pluginmanager.get_plugins():
        devices = getattr(plugin, "TEST_DEVICES", None)
        if isinstance(devices, dict):
            devices[_DEVICE] = torch.device(_DEVICE, 0) if _DEVICE != "cpu" else torch.device("cpu")


def pytest_itemcollected() -> None:
    """Changes what the suite's tests have imported by now."""
    tester: Any = sys.modules.get("unittests._helpers.testers")
    if tester is not None:
        tester._select_rand_best_device = lambda: _DEVICE
