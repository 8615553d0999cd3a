"""Kernel groups on other buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from .attention_nodes import Attention
from .graph import (
    AnchorGroup,
    Buffer,
    ForeachGroup,
    JointGroup,
    KernelGroup,
    MapGroup,
    Member,
    PairGroup,
    RowGroup,
    SiblingGroup,
    SingleGroup,
)
from .nodes import HostCall, Node, Scatter, inputs_of, map_bodies, outputs_of
from .scalar import Load, Scalar, loads_of, rewrite

_Group = TypeVar("_Group", bound=KernelGroup)


def form_of(
    group: KernelGroup, buffers: Mapping[str, Buffer]
) -> tuple[Hashable, tuple[str, ...]] | None:
    """(what a group computes, the names of its buffers); None for a group on the host.

    The first is equal for groups that differ in names of buffers only. The names are in an order
    that corresponds: the n-th of one group plays the part of the n-th of the other.
    """
    if isinstance(group, SingleGroup) and isinstance(group.node, HostCall):
        return None
    names: dict[str, str] = {}
    for name in _names(group):
        found: str | None = name
        while found is not None and found not in names:
            names[found] = f"b{len(names)}"
            found = buffers[found].shares
    layouts = tuple(
        replace(buffers[name], name="", shares=names.get(buffers[name].shares or ""))
        for name in names
    )
    return (rename_group(group, names), layouts), tuple(names)


def _names(group: KernelGroup) -> Iterator[str]:
    """What a group computes and loads, in an order that its form determines."""
    match group:
        case SingleGroup(node):
            yield from (*outputs_of(node), *inputs_of(node))
        case AnchorGroup(anchor, epilogue):
            yield from (*outputs_of(anchor), *inputs_of(anchor))
            yield from _names_of_members(epilogue)
        case MapGroup(members=members) | RowGroup(members=members):
            yield from _names_of_members(members)
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            for part in groups:
                yield from _names(part)


def _names_of_members(members: tuple[Member, ...]) -> Iterator[str]:
    for member in members:
        yield member.output
        for load in loads_of(member.body):
            yield load.buffer


def rename_group(group: _Group, names: Mapping[str, str]) -> _Group:
    """The group with buffers renamed; none of its nodes runs on the host."""

    def members(found: tuple[Member, ...]) -> tuple[Member, ...]:
        return tuple(
            replace(member, output=names[member.output], body=_rename_loads(member.body, names))
            for member in found
        )

    changed: dict[str, object]
    match group:
        case SingleGroup(node):
            changed = {"node": rename_node(node, names)}
        case AnchorGroup(anchor, epilogue):
            changed = {"anchor": rename_node(anchor, names), "epilogue": members(epilogue)}
        case MapGroup() | RowGroup():
            changed = {"members": members(group.members)}
        case SiblingGroup(groups) | PairGroup(groups) | ForeachGroup(groups) | JointGroup(groups):
            changed = {"groups": tuple(rename_group(part, names) for part in groups)}
    return replace(group, **changed)  # type: ignore[arg-type]


def rename_node(node: Node, names: Mapping[str, str]) -> Node:
    """The node with buffers renamed; it is not a `HostCall`."""
    assert not isinstance(node, HostCall)
    made = map_bodies(node, lambda body: _rename_loads(body, names))
    assert not isinstance(made, HostCall)
    made = replace(made, output=names[node.output])
    match made:
        case Scatter(initial=initial):
            return replace(made, initial=names[initial])
        case Attention(logsumexp=str(logsumexp)):
            return replace(made, logsumexp=names[logsumexp])
        case _:
            return made


def _rename_loads(body: Scalar, names: Mapping[str, str]) -> Scalar:
    def change(scalar: Scalar) -> Scalar | None:
        if isinstance(scalar, Load):
            return Load(names[scalar.buffer], scalar.index, scalar.dtype)
        return None

    return rewrite(body, change)
