"""What spawned processes run."""

from __future__ import annotations

from typing import Any

import torch

from torch_webgpu_compile.device.autoload import register


def child(queue: Any) -> None:
    """Sends what a computation on the device gives."""
    register()
    queue.put((torch.ones(2, device="webgpu") + 1).tolist())
