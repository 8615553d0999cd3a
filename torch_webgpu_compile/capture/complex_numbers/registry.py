"""The table of rules: how an ATen operator on complex tensors is computed with real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...torch_private import OpOverload, OpOverloadPacket


@dataclass(frozen=True, slots=True)
class ComplexCall:
    """A call that involves complex numbers.

    Attributes:
        op: the operator.
        dtype: of the parts to compute with: float32 for complex32 and complex64 (PyTorch's opmath).
        results: what the operator gives: fake tensors.
        arguments: the positional arguments, with fake tensors.
    """

    op: OpOverload
    dtype: torch.dtype
    results: tuple[Any, ...]
    arguments: tuple[Any, ...]

    @property
    def result(self) -> Any:
        """The operator's only, or first, fake result."""
        return self.results[0]


ComplexRule = Callable[..., Any]
"""Takes a `ComplexCall` and the arguments of the ATen schema, a `Pair` for each complex tensor.

Returns pairs and real tensors. The caller converts them to the dtypes of the call's results."""

RULES: dict[OpOverload, ComplexRule] = {}

_Function = TypeVar("_Function", bound=ComplexRule)


def rule(*ops: OpOverload) -> Callable[[_Function], _Function]:
    """Adds a rule for overloads. Raises KeyError if one of them has a rule."""

    def add(function: _Function) -> _Function:
        for op in ops:
            if op in RULES:
                raise KeyError(f"two rules for {op} on complex tensors")
            RULES[op] = function
        return function

    return add


def overloads(*packets: OpOverloadPacket) -> list[OpOverload]:
    """Every overload of operators that changes none of its arguments."""
    found = [
        getattr(packet, name)
        for packet in packets
        for name in packet.overloads()  # type: ignore[no-untyped-call]
    ]
    return [op for op in found if not op._schema.is_mutable]
