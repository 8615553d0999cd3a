"""Seeds of the random operators on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_seeds(index: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Seeds for ``count`` random operators: int32 (count, 2), on the CPU."""
    return torch.empty((count, 2), dtype=torch.int32).random_(generator=generator)
