"""Casts of weights that ``torch.autocast("webgpu")`` keeps are dropped with PyTorch's own.

Patched: ``torch.clear_autocast_cache``, which autocast calls as an attribute of ``torch`` when the
outermost context is left.

Why: PyTorch's cache, in C++, only serves its own casts; `autocast` keeps those of its kernels.

Until: PyTorch has autocast kernels for PrivateUse1 devices, or tells them when a context is left.
"""

from __future__ import annotations

from typing import Any

from ..import_hooks import around


@around("torch:clear_autocast_cache")
def clear_autocast_cache(original: Any) -> None:
    from ..api import autocast

    autocast.casts.clear()
    original()
