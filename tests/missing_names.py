"""Programs on a version of PyTorch without any private name that this package can do without."""

from __future__ import annotations

import os
import subprocess
import sys

_WITHOUT = """
from torch_webgpu_compile import torch_private
from torch_webgpu_compile.torch_private import symbols
def resolve(row):
    if row.loss is not symbols.Loss.FATAL:
        raise AttributeError(row.name)
    return symbols.resolve(row)
torch_private.resolve = resolve
import torch
"""


def run_without_names(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, in which those names are missing."""
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT + program],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
    )
