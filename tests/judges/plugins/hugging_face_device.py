"""A pytest plugin: the device of ``JUDGE_DEVICE`` for the tests of accelerate and peft.

Their functions that choose the device of tests ask for CUDA and a list of others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate.test_utils.testing as testing
import torch

_DEVICE = os.environ["JUDGE_DEVICE"]


def _allocated() -> int:
    return int(torch.accelerator.memory_allocated()) if _DEVICE != "cpu" else 0


_backend = (_DEVICE, 1, _allocated)
_NAMES = ("torch_device", "device_count", "memory_allocated_func")
_testing: Any = testing
_testing.get_backend = lambda: _backend
for _place in (_testing, sys.modules["accelerate.test_utils"]):
    vars(_place).update(zip(_NAMES, _backend, strict=True))

if (Path.cwd() / "src" / "peft").exists():
    import peft  # noqa: F401

    for _name, _module in list(sys.modules.items()):
        if _name.startswith("peft") and hasattr(_module, "infer_device"):
            _module.infer_device = lambda: _DEVICE
