"""What a map group computes, apart from on which buffers and how many elements."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ..sizes import product
from .graph import Buffer, MapGroup
from .scalar import Checked, Const, Index, Load, Masked, Op, walk


@dataclass(frozen=True, slots=True)
class Canonical:
    """A map group's members with each load replaced by its number.

    Attributes:
        key: equal for groups that compute the same from what they load.
        loads: what the numbers stand for, in order of first appearance: of memory, at indices that
            the group's symbols determine.
    """

    key: Hashable
    loads: tuple[Load, ...]


def canonical_form(group: MapGroup, buffers: Mapping[str, Buffer]) -> Canonical | None:
    """The form of a group of known size, at least 1; None for one that cannot be run side by side.

    That are groups whose elements depend on their place other than by what they load there, that
    gather, and that load under a condition, without which the memory may not be there.
    """
    numel = product(group.ranges)
    if not numel.is_constant or numel.constant == 0:
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
