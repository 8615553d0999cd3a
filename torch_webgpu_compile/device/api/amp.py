"""``torch.webgpu.amp``: the functions of `torch.amp` that take a device, for this one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ...tensors import devices

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
) -> torch.autocast:
    """``torch.autocast("webgpu")``, with the arguments of ``torch.cuda.amp.autocast``."""
    return torch.autocast(devices.NAME, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("webgpu")``; its other arguments."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(devices.NAME, *arguments, **keywords)


_of_torch: Any = torch.amp
custom_fwd = partial(_of_torch.custom_fwd, device_type=devices.NAME)
custom_bwd = partial(_of_torch.custom_bwd, device_type=devices.NAME)
