"""Operators that others define, with ``torch.library`` or in C++."""

from __future__ import annotations

from typing import Any

from ..torch_private import OpOverload

NO_IMPLEMENTATION = (
    'it has no implementation for webgpu tensors: its register_kernel("webgpu") would give it one'
)
"""Why such an operator runs on the host."""


def is_foreign(op: Any) -> bool:
    """Whether an operator is none of PyTorch's own."""
    return isinstance(op, OpOverload) and op.namespace not in ("aten", "prim", "prims")
