"""``flex_attention`` of tensors on the device.

Patched: ``torch.nn.attention.flex_attention._validate_device``, which then takes ``webgpu``, too.

Why: it lists the devices that it takes by name, and raises ``ValueError`` for all others, also for
those that have kernels of the operator, or compute it with others as the CPU does.

Until: PyTorch takes the devices of PrivateUse1 backends.
"""

from __future__ import annotations

from typing import Any

from ...tensors import devices
from ..import_hooks import around


@around("torch.nn.attention.flex_attention:_validate_device")
def validate(original: Any, query: Any, key: Any, value: Any) -> None:
    if query.device.type != devices.NAME:
        original(query, key, value)
