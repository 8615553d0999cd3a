"""`capture_sequence`: several calls of ATen operators, one after the other, as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from .arguments import symbolic_leaves
from .calls import CapturedCall, TensorSpec
from .capture import Traceable, apply_op, capture


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument that is leaf number ``position`` of the sequence."""

    position: int


@dataclass(frozen=True, slots=True)
class Made:
    """An argument that is tensor number ``position`` of those that calls return, in their order.

    Attributes:
        spec: what it looks like.
    """

    position: int
    spec: TensorSpec


@dataclass(frozen=True)
class SequenceCall:
    """A call of a sequence.

    Attributes:
        op: what is called; it returns nothing, or a list of tensors.
        args, kwargs: with a `Leaf` or `Made` in place of tensors and of numbers that may differ
            from sequence to sequence.
    """

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


def capture_sequence(
    calls: Sequence[SequenceCall],
    leaves: Sequence[Any],
    wanted: Sequence[int],
    native: frozenset[OpOverload],
) -> CapturedCall:
    """Captures calls as one graph, which reads the leaves, changes them as the calls do, and gives
    what is ``wanted``.

    Args:
        leaves: a `TensorSpec` for each tensor, which shares memory with no other, and numbers.
        wanted: positions of made tensors.

    Raises:
        UnsupportedOp: the calls cannot be traced.
    """
    chosen: set[int] = set()
    for call in calls:
        chosen |= _symbols(call, leaves)

    def apply(filled: Sequence[Any]) -> list[Any]:
        made: list[Any] = []

        def value_of(place: Leaf | Made) -> Any:
            return filled[place.position] if isinstance(place, Leaf) else made[place.position]

        for call in calls:
            args, kwargs = tree_map_only(
                (Leaf, Made), value_of, (list(call.args), dict(call.kwargs))
            )
            results = apply_op(call.op, args, kwargs) or ()
            made += map(_rounded, results)
            for value, argument in zip(args, call.op._schema.arguments, strict=False):
                if argument.is_write:
                    for tensor in value:
                        if tensor.dtype in _ROUNDED:
                            tensor.copy_(_rounded(tensor))
        return [made[position] for position in wanted]

    name = f"the {len(calls)} operators from {calls[0].op} to {calls[-1].op}"
    short = f"{len(calls)}_from_{calls[0].op._schema.name.split('::')[-1]}"
    return capture(Traceable(name, short, apply, True, False), leaves, frozenset(chosen), native)


_ROUNDED = (torch.float16, torch.bfloat16)


def _rounded(tensor: Tensor) -> Tensor:
    """A tensor as it is in memory, which a graph would not round to 16 bits before its end."""
    return tensor.float().to(tensor.dtype) if tensor.dtype in _ROUNDED else tensor


def _symbols(call: SequenceCall, leaves: Sequence[Any]) -> set[int]:
    """The leaves whose numbers may be any to a call."""

    def described(place: Leaf | Made) -> Any:
        return leaves[place.position] if isinstance(place, Leaf) else place.spec

    places = tree_leaves((list(call.args), dict(call.kwargs)))
    args, kwargs = tree_map_only((Leaf, Made), described, (list(call.args), dict(call.kwargs)))
    found = symbolic_leaves(call.op, args, kwargs, tree_leaves((args, kwargs)))
    chosen = {places[k].position for k in found if isinstance(places[k], Leaf)}
    return {k for k in chosen if type(leaves[k]) is float}
