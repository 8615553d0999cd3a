"""Casts of weights that ``torch.autocast("webgpu")`` keeps are dropped with PyTorch's own.

Patched: ``torch.clear_autocast_cache``, which autocast calls as an attribute of ``torch`` when the
outermost context is left.

Why: PyTorch's cache, in C++, only serves its own casts; `autocast` keeps those of its kernels.

Until: PyTorch has autocast kernels for PrivateUse1 devices, or tells them when a context is left.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def install(clear: Callable[[], None]) -> None:
    """Has ``torch.clear_autocast_cache`` call ``clear`` too."""
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        clear()
        original()

    torch.clear_autocast_cache = clear_autocast_cache
