"""``torch.webgpu``."""

from __future__ import annotations

from typing import Any

import torch

from .. import devices


def install() -> None:
    """What else ``import torch`` needs."""


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return devices.device_count() > 0


def device_count() -> int:
    return devices.device_count()


def current_device() -> int:
    return devices.current_index()


def set_device(device: Any) -> None:
    devices.set_current(
        device if isinstance(device, int) else devices.index_of(torch.device(device))
    )


def _is_in_bad_fork() -> bool:
    return devices.is_in_bad_fork()


def manual_seed_all(seed: int) -> None:
    pass


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]
