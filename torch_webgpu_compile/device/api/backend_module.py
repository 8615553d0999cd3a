"""``torch.backends.webgpu``: as ``torch.backends.mps``."""

from __future__ import annotations

from ...tensors import devices

__all__ = ["is_available", "is_built"]


def is_built() -> bool:
    """True: nothing has to be built into PyTorch for this device."""
    return True


def is_available() -> bool:
    """Whether there is a GPU that WebGPU can use."""
    return devices.device_count() > 0
