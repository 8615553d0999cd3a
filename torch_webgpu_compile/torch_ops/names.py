"""Names of operators in PyTorch's dispatcher."""

from __future__ import annotations

from ..torch_private import OpOverload


def dispatch_name(op: OpOverload) -> str:
    """``aten::add.Tensor``; without a period where the overload is the default one."""
    name: str = op.name()  # type: ignore[no-untyped-call]
    return name
