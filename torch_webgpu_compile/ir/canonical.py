"""Canonical forms of map groups, up to names of buffers and numbers of elements."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from ..symbolic.sizes import ZERO, product
from .access import load_index
from .buffers import Buffer
from .graph import MapGroup
from .scalar import Checked, Index, Load, Masked, Scalar, rewrite, walk


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
    names: dict[Load, str] = {}
    computed: dict[str, str] = {}

    def without_index(node: Scalar) -> Scalar | None:
        """A load as the number that it is read, or was computed, as."""
        if not isinstance(node, Load) or load_index(node) is None:
            return None
        name = computed.get(node.buffer) or names.setdefault(node, f"load{len(names)}")
        return Load(name, (), node.dtype)

    members: list[Hashable] = []
    for member in group.members:
        body = rewrite(member.body, without_index)
        if member.reduction is not None or any(map(_needs_index, walk(body))):
            return None
        computed[member.output] = f"member{len(members)}"
        members.append((body, member.store, buffers[member.output].dtype))
    return Canonical(tuple(members), tuple(names))


def _needs_index(node: Scalar) -> bool:
    """Whether a node depends on more than numbers that are loaded, which have no index here."""
    return isinstance(node, Index | Masked | Checked) or (
        isinstance(node, Load) and node.index != ()
    )
