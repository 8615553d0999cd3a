"""Operators that users have written in WGSL: their description, beside their lowering."""

from __future__ import annotations

from ..torch_private import OpOverload

WITHOUT_HOST: set[OpOverload] = set()
"""Operators that a GPU alone computes: where one has no kernel, that is an error."""

POINTWISE: set[OpOverload] = set()
"""Those of them of which an element of a result is computed from one of each argument."""


def add(op: OpOverload, pointwise: bool) -> None:
    """Notes an operator that was defined just now."""
    WITHOUT_HOST.add(op)
    if pointwise:
        POINTWISE.add(op)
