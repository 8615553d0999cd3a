"""Names of operators in PyTorch's dispatcher."""

from __future__ import annotations

import torch

from ..torch_private import OpOverload


def dispatch_name(op: OpOverload) -> str:
    """``aten::add.Tensor``; without a period where the overload is the default one."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name


def overload_of(name: str) -> OpOverload:
    """ATen's overload of a name without its namespace: ``add.Tensor``, ``relu``."""
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found
