"""``associative_scan`` in its default mode, on tensors of the device.

Patched: ``torch._higher_order_ops.associative_scan.associative_scan``, also as the package has it.

Why: ``combine_mode="pointwise"``, the default, is refused for all but CUDA and XPU tensors before a
backend is asked. The mode ``"generic"`` takes every function that it takes, and gives the same.

Until: PyTorch asks the backend.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .. import devices
from ..import_hooks import after_import


def install() -> None:
    """Patches the function once it is there."""
    after_import("torch._higher_order_ops.associative_scan", _patch)


def _patch(module: Any) -> None:
    original = module.associative_scan

    @wraps(original)
    def associative_scan(
        combine_fn: Any, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise"
    ) -> Any:
        if combine_mode == "pointwise" and any(
            isinstance(x, torch.Tensor) and x.device.type == devices.NAME for x in tree_leaves(xs)
        ):
            combine_mode = "generic"
        return original(combine_fn, xs, dim, reverse, combine_mode)

    module.associative_scan = associative_scan
    package: Any = torch._higher_order_ops
    if getattr(package, "associative_scan", None) is original:
        package.associative_scan = associative_scan
