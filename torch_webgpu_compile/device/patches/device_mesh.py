"""``DeviceMesh``: processes of one host that share a GPU.

Patched: ``DeviceMesh._setup_world_group_and_device``, which then chooses a device that exists.

Why: a mesh makes ``webgpu:LOCAL_RANK`` current where the process has not used a device yet, and
does not ask how many there are. With more processes than adapters (two processes of ``torchrun`` on
a machine with one GPU, or with a software adapter) that raised, though gloo does not mind that
processes share a GPU.

Until: PyTorch takes the local rank modulo the number of devices, as it does without a launcher.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import around


def _setup(original: Any, self: Any) -> Any:
    if self._device_type == devices.NAME and not devices.opened():
        _choose(int(os.environ.get("LOCAL_RANK", 0)))
    return original(self)


if torch.distributed.is_available():
    around("torch.distributed.device_mesh:DeviceMesh._setup_world_group_and_device")(_setup)


def _choose(rank: int) -> None:
    """Opens the device of a local rank where there are fewer devices: the mesh leaves it then."""
    count = devices.device_count()
    if 0 < count <= rank:
        devices.set_current(rank % count)
        devices.get_device(rank % count)
