"""``torch.autograd.profiler.profile(use_device="webgpu")``: the host's times, and a warning.

Patched: the method ``_prepare_trace`` of ``torch.autograd.profiler.profile``.

Why: it asks a PrivateUse1 device for events that only C++ can provide, and without them prints an
exception for each operator and a table of random numbers. A trace of the device alone
(``torch.profiler.profile(activities=[ProfilerActivity.PrivateUse1])``) is empty without a word.

Until: a PrivateUse1 backend in Python can time what a profiler sees.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around


@around("torch.autograd.profiler:profile._prepare_trace")
def prepare_trace(original: Any, self: Any) -> None:
    """Has PyTorch's profiler time the host alone, where it would ask the device for events."""
    kinds: Any = torch.autograd.ProfilerState  # type: ignore[attr-defined]
    is_legacy = self.profiler_kind == kinds.KINETO_PRIVATEUSE1_FALLBACK
    if self.use_device == devices.NAME and (is_legacy or not self.use_cpu):
        warnings.warn(
            "PyTorch's profiler cannot time webgpu kernels, but only what the host does: "
            "torch_webgpu_compile.profile() times them",
            stacklevel=4,
        )
    if self.use_device == devices.NAME and is_legacy:
        self.profiler_kind, self.use_device = kinds.KINETO, None
    original(self)
