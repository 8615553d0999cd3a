"""``torch.autograd.profiler.profile(use_device="webgpu")``: the host's times, and a warning.

Patched: ``torch.autograd.profiler.profile.__init__``.

Why: it asks a PrivateUse1 device for events that only C++ can provide, and without them prints an
exception for each operator and a table of random numbers. A trace of the device alone
(``torch.profiler.profile(activities=[ProfilerActivity.PrivateUse1])``) is empty without a word.

Until: a PrivateUse1 backend in Python can time what a profiler sees.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from .. import devices


def install() -> None:
    """Has PyTorch's profiler time the host alone, where it would ask the device for events."""
    profile: Any = torch.autograd.profiler.profile
    original = profile.__init__

    @functools.wraps(original)
    def __init__(self: Any, enabled: bool = True, **keywords: Any) -> None:
        if enabled and keywords.get("use_device") == devices.NAME:
            is_legacy = not keywords.get("use_kineto")
            if is_legacy or not keywords.get("use_cpu", True):
                warnings.warn(
                    "PyTorch's profiler cannot time webgpu kernels, but only what the host does: "
                    "torch_webgpu_compile.profile() times them",
                    stacklevel=2,
                )
            if is_legacy:
                keywords["use_device"] = None
        original(self, enabled, **keywords)

    profile.__init__ = __init__
