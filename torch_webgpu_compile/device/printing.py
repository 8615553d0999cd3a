"""Prints device tensors from CPU copies, as PyTorch does for devices without float64."""

from __future__ import annotations

from typing import Any

import torch._tensor_str
from torch import Tensor

from ..copying import is_here


def install() -> None:
    """Puts a copy to the CPU before PyTorch's formatting of a tensor's elements."""
    module: Any = torch._tensor_str
    original = module._tensor_str

    def tensor_str(self: Tensor, indent: int) -> Any:
        return original(self.cpu() if is_here(self) else self, indent)

    module._tensor_str = tensor_str
