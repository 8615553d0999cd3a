"""What a row group's members need of each other: passes over the row, and sums that share one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..ir.graph import RowGroup
from ..ir.scalar import Load, Op, Scalar, loads_of, rewrite
from ..ir.spaces import iteration_symbols, symbol_keys
from ..symbolic.sizes import symbols_of


@dataclass(frozen=True, slots=True)
class ShiftedSum:
    """A member that is Σ exp(v − shift), where ``largest`` names the member that is max v.

    ``shift`` has one value per row and is known once the maximum is.
    """

    largest: str
    shift: Scalar


def varying_members(group: RowGroup) -> frozenset[str]:
    """Members with one value per element rather than per row."""
    elements = set(symbol_keys(iteration_symbols("r", group.elements)))
    return frozenset(
        m.output
        for m in group.members
        if m.reduction is None and any(symbols_of(i) & elements for i in m.index)
    )


def passes_needed(group: RowGroup, sums: Mapping[str, ShiftedSum]) -> dict[str, int]:
    """Passes over the row that must be complete before a member's value is known.

    ``sums`` are accumulated in the pass of their maximum, and complete when their shift is known.
    """
    depth: dict[str, int] = {}
    for m in group.members:
        own = sums.get(m.output)
        loads = loads_of(m.body if own is None else own.shift)
        needed = max((depth[o.buffer] for o in loads if o.buffer in depth), default=0)
        if own is not None:
            depth[m.output] = max(needed, depth[own.largest])
        else:
            depth[m.output] = needed + (1 if m.reduction else 0)
    return depth


def shifted_sums(
    group: RowGroup, varying: frozenset[str], belongs_to_row: Callable[[Scalar], bool]
) -> dict[str, ShiftedSum]:
    """Sums that can be computed in the pass of a maximum, at most one for each maximum.

    That is the denominator of softmax, log-softmax and logsumexp, however they are written.
    """
    depth = passes_needed(group, {})
    bodies: dict[str, Scalar] = {}

    def expand(node: Scalar) -> Scalar | None:
        return bodies.get(node.buffer) if isinstance(node, Load) else None

    found: dict[str, ShiftedSum] = {}
    maxima: dict[Scalar, str] = {}
    for m in group.members:
        body = rewrite(m.body, expand)
        if m.output in varying:
            bodies[m.output] = body
        elif m.reduction == "maximum" and body.dtype.compute == "f32":
            maxima[body] = m.output
        elif m.reduction == "sum":
            if not isinstance(body, Op) or body.name not in ("exp", "fast_exp"):
                continue
            difference = body.args[0]
            if not isinstance(difference, Op) or difference.name != "sub":
                continue
            value, shift = difference.args
            largest = maxima.get(value)
            if largest is None or not belongs_to_row(shift):
                continue
            if depth[m.output] > depth[largest]:
                found[m.output] = ShiftedSum(largest, shift)
                del maxima[value]
    return found
