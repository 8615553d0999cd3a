"""``torch.amp.GradScaler`` takes its scale's reciprocal in float32 where there is no float64.

Patched: ``GradScaler.unscale_`` in ``torch.amp.grad_scaler``.

Why: it computes ``scale.double().reciprocal().float()``, which runs on the host without float64:
each step of training would wait for the GPU. PyTorch leaves float64 out for "mps" alone. Scales are
powers of two, unless the user has set others.

Until: PyTorch asks the device whether it has float64.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around


class _Scale:
    """Stands for a scale whose reciprocal is taken in float32."""

    def __init__(self, scale: torch.Tensor) -> None:
        self._scale = scale
        self.device = scale.device

    def double(self) -> _Scale:
        return self

    def reciprocal(self) -> torch.Tensor:
        return self._scale.reciprocal()


@around("torch.amp.grad_scaler:GradScaler.unscale_")
def unscale_(original: Any, self: Any, optimizer: torch.optim.Optimizer) -> None:
    scale = getattr(self, "_scale", None)  # a scaler that is switched off has none
    if torch.compiler.is_compiling() or scale is None or _has_float64(scale.device):
        original(self, optimizer)
        return
    self._scale = _Scale(scale)
    try:
        original(self, optimizer)
    finally:
        self._scale = scale


def _has_float64(device: torch.device) -> bool:
    if device.type != devices.NAME:
        return True
    return "shader-f64" in devices.adapter_of(devices.index_of(device)).features
