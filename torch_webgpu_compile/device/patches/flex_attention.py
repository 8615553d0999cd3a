"""``flex_attention`` of tensors on the device.

Patched: ``torch.nn.attention.flex_attention._validate_device``, which then takes ``webgpu``, too.

Why: it lists the devices that it takes by name, and raises ``ValueError`` for all others, also for
those that have kernels of the operator, or compute it with others as the CPU does.

Until: PyTorch takes the devices of PrivateUse1 backends.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import devices
from ..import_hooks import after_import


def install() -> None:
    """Replaces the check when its module is imported."""
    after_import("torch.nn.attention.flex_attention", _replace)


def _replace(module: Any) -> None:
    original = module._validate_device
    name = devices.NAME

    @functools.wraps(original)
    def validate(query: Any, key: Any, value: Any) -> None:
        if query.device.type != name:
            original(query, key, value)

    module._validate_device = validate
