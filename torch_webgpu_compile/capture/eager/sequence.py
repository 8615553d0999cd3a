"""`capture_sequence`: several calls of ATen operators, one after the other, as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    like: Sequence[Sequence[Any]] = (),
) -> CapturedCall:
    """Captures calls as one graph, which reads the leaves, changes them as the calls do, and gives
    what is ``wanted``.

    Args:
        leaves: a `TensorSpec` for each tensor, which shares memory with no other, and numbers.
        wanted: positions of made tensors.
        like: leaves of earlier such sequences, which tell what changes.

    Raises:
        UnsupportedOp: the calls cannot be traced.
    """
    chosen: dict[int, frozenset[float]] = {}
    for call in calls:
        for leaf, others in _symbols(call, leaves, like).items():
            chosen[leaf] = chosen.get(leaf, others) | others

    def apply(filled: Sequence[Any]) -> list[Any]:
        made: list[Any] = []

        def value_of(place: Leaf | Made) -> Any:
            return filled[place.position] if isinstance(place, Leaf) else made[place.position]

        for call in calls:
            args, kwargs = tree_map_only(
                (Leaf, Made), value_of, (list(call.args), dict(call.kwargs))
            )
            made += apply_op(call.op, args, kwargs) or ()
        return [made[position] for position in wanted]

    name = f"the {len(calls)} operators from {calls[0].op} to {calls[-1].op}"
    short = f"{len(calls)}_from_{calls[0].op._schema.name.split('::')[-1]}"
    return capture(Traceable(name, short, apply, True, False), leaves, chosen, native)


def _symbols(
    call: SequenceCall, leaves: Sequence[Any], like: Sequence[Sequence[Any]]
) -> dict[int, frozenset[float]]:
    """The leaves whose numbers may be any to a call, but for some values."""
    given = list(call.args), dict(call.kwargs)
    places = tree_leaves(given)

    def described(place: Leaf | Made) -> Any:
        return leaves[place.position] if isinstance(place, Leaf) else place.spec

    def at(earlier: Sequence[Any]) -> list[Any]:
        return [earlier[p.position] if isinstance(p, Leaf) else p for p in places]

    args, kwargs = tree_map_only((Leaf, Made), described, given)
    found = symbolic_leaves(
        call.op, args, kwargs, tree_leaves((args, kwargs)), [at(earlier) for earlier in like]
    )
    return {
        places[k].position: others
        for k, others in found.items()
        if isinstance(places[k], Leaf) and type(leaves[places[k].position]) is float
    }
