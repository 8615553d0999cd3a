"""Tests of eager operators on ``torch.device("webgpu")``."""

from __future__ import annotations

import pytest
import torch  # noqa: F401  (PyTorch first: the device is registered with it)

from torch_webgpu_compile import fallbacks
from torch_webgpu_compile.device.autoload import register

register()


@pytest.fixture(autouse=True)
def _fresh_warnings():
    fallbacks.reset_warnings()
