"""The GPU memory that a call needs, by what it is of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import human_bytes
from ..plan.model import Plan
from ..runtime.buffers import bucket_nbytes
from ..symbolic.sizes import Expr

_Kind = Literal["state", "weights", "activations", "other"]


@dataclass(frozen=True)
class Memory:
    """Bytes of GPU memory, as buffers take them: sizes are rounded up where memory is pooled.

    Attributes:
        weights: parameters and buffers that calls leave as they are, constants, and what is
            prepared from them.
        state: arguments that calls change, as a cache, buffers, or an optimizer's state.
        activations: the most that a call holds at once of what it computes and does not return,
            and what a forward graph saves for its backward graph.
        other: other arguments, and results.
    """

    weights: int = 0
    state: int = 0
    activations: int = 0
    other: int = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.weights + self.state + self.activations + self.other

    def __str__(self) -> str:
        parts = (
            (self.weights, "of weights"),
            (self.state, "that calls change"),
            (self.activations, "of activations"),
            (self.other, "of inputs and results"),
        )
        return ", ".join(f"{human_bytes(n)} {what}" for n, what in parts if n) or "nothing"


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that is needed before or after a call, or by its preparation.

    Attributes:
        memory: equal where several graphs have the same.
    """

    kind: _Kind
    memory: Hashable
    nbytes: int


def holdings_of(
    plan: Plan,
    static: Collection[int],
    saved: Collection[int],
    memory: Mapping[str, Hashable],
    number: Callable[[Expr], int],
) -> tuple[Holding, ...]:
    """What a plan's buffers take, but for those that live within a call.

    Args:
        static: positions of the plan's inputs that are parameters and buffers of modules.
        saved: positions of its outputs that only a backward graph will see.
        memory: identifies the memory that a buffer had in a call, by its name.
        number: the value of an expression of sizes.
    """
    inputs = [entry.buffer for entry in plan.inputs]
    changed = {inputs[out.mutates] for out in plan.outputs if out.mutates is not None}
    kept = {inputs[position] for position in static}
    only_saved = {plan.outputs[position].buffer for position in saved}
    lasting = {*inputs, *plan.constants, *plan.prepared, *plan.returned}
    found = []
    for name, buffer in plan.buffers.items():
        if name not in lasting:
            continue
        kind: _Kind = "other"
        if name in changed:
            kind = "state"
        elif name in kept or buffer.role in ("constant", "prepared"):
            kind = "weights"
        elif name in only_saved:
            kind = "activations"
        identity = memory.get(name, (plan.name, name))
        found.append(Holding(kind, identity, bucket_nbytes(max(0, number(buffer.nbytes)))))
    return tuple(found)


def memory_of(holdings: Iterable[Holding], peak_nbytes: int) -> Memory:
    """The memory of a call or of several: what they share counts once, as what changes most.

    Args:
        peak_nbytes: of what lives within a call.
    """
    by_kind: dict[_Kind, dict[Hashable, int]] = {
        kind: {} for kind in ("state", "weights", "activations", "other")
    }
    for holding in holdings:
        known = by_kind[holding.kind]
        known[holding.memory] = max(holding.nbytes, known.get(holding.memory, 0))
    seen: set[Hashable] = set()
    nbytes = {}
    for kind, known in by_kind.items():
        nbytes[kind] = sum(n for memory, n in known.items() if memory not in seen)
        seen.update(known)
    return Memory(
        nbytes["weights"], nbytes["state"], nbytes["activations"] + peak_nbytes, nbytes["other"]
    )
