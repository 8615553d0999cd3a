"""What a row group's members need of each other: passes, sums that share one, roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .. import dtypes
from ..ir.graph import Buffer, Member, RowGroup
from ..ir.scalar import Load, Op, Scalar, loads_of, rewrite
from ..ir.spaces import iteration_symbols, symbol_keys
from ..symbolic.sizes import symbols_of
from .casts import Let, rounded
from .values import Text

_HALVES = (dtypes.float16, dtypes.bfloat16)


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


class Rounding:
    """Of the members that are stored in 16 bits and that other members of the kernel read.

    Values are computed in 32 bits. What other kernels read is rounded, and so has to be what
    statistics of rows are computed of: the mean of numbers that are not rounded is not the mean of
    those that are. Kernels without statistics go on with 32 bits, as fused optimizers do.
    """

    def __init__(self, members: Sequence[Member], buffers: Mapping[str, Buffer]) -> None:
        stored = {m.output for m in members if m.store and buffers[m.output].dtype in _HALVES}
        self._outputs = frozenset(
            load.buffer
            for m in members
            for load in loads_of(m.body)
            if load.buffer in stored and load.buffer != m.output
        )

    def __call__(self, output: str, value: Text, let: Let) -> Text:
        """The value of a member, as others are to read it."""
        return rounded(value, let) if output in self._outputs else value
