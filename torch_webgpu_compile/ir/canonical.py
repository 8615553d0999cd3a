"""Canonical forms of map groups, up to names of buffers and numbers of elements."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ..symbolic.sizes import ZERO, product
from .buffers import Buffer
from .graph import MapGroup
from .scalar import Checked, Const, FunctionCall, Index, Load, Masked, Op, walk


@dataclass(frozen=True, slots=True)
class Canonical:
    """A map group up to the names of buffers and the number of elements.

    Two groups with equal keys can be computed by the same statements, each on its own buffers.

    Attributes:
        key: the expressions of all members, in which each load is a number.
        loads: the load that each number stands for, in order of first appearance.
    """

    key: Hashable
    loads: tuple[Load, ...]


def canonical_form(group: MapGroup, buffers: Mapping[str, Buffer]) -> Canonical | None:
    """The form of a map group, or None if it cannot share statements with other groups.

    None for a group of no size, and for one whose members use an index as a value, gather at
    indices from data, load under a condition or reduce: these depend on more than the numbers that
    are loaded.
    """
    if product(group.ranges) is ZERO:
        return None
    numbers: dict[object, int] = {}
    entries: list[Hashable] = []
    loads: list[Load] = []
    members: list[Hashable] = []
    computed: dict[str, int] = {}
    for member in group.members:
        nodes = list(walk(member.body))
        indices = {i for node in nodes if isinstance(node, Load) for i in node.index}
        for node in nodes:
            if node in numbers:
                continue
            match node:
                case Index():
                    if node not in indices:
                        return None
                    continue
                case Masked() | Checked():
                    return None
                case Const(value, dtype):
                    entry: Hashable = ("const", type(value), repr(value), dtype)
                case Op(name, args, dtype):
                    if any(isinstance(argument, Index) for argument in args):
                        return None
                    entry = ("op", name, tuple(numbers[a] for a in args), dtype)
                case FunctionCall(function, args, result):
                    if any(isinstance(argument, Index) for argument in args):
                        return None
                    entry = ("call", function, tuple(numbers[a] for a in args), result)
                case Load(buffer, index, dtype):
                    if any(not isinstance(i, Index) for i in index):
                        return None
                    if buffer in computed:
                        entry = ("member", computed[buffer])
                    else:
                        entry = ("load", len(loads), dtype)
                        loads.append(node)
            numbers[node] = len(entries)
            entries.append(entry)
        if isinstance(member.body, Index) or member.reduction is not None:
            return None
        computed[member.output] = len(members)
        members.append((numbers[member.body], member.store, buffers[member.output].dtype))
    return Canonical((tuple(entries), tuple(members)), tuple(loads))
