"""Kernel groups with other names of buffers, and keys of groups up to those names."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..symbolic.nested import rename_buffers
from .buffers import Buffer
from .graph import KernelGroup, Member, is_host_call, map_group
from .nodes import inputs_of, map_bodies, outputs_of
from .scalar import Load, Scalar, loads_of, rewrite
from .spaces import Node

_Group = TypeVar("_Group", bound=KernelGroup)
_Node = TypeVar("_Node", bound=Node)


def group_key(
    group: KernelGroup, buffers: Mapping[str, Buffer]
) -> tuple[Hashable, tuple[str, ...]] | None:
    """(a key of a group up to names of buffers, those names); None for a group on the host.

    The key is equal for groups that differ in names of buffers only. The names are in an order
    that corresponds: the n-th of one group plays the part of the n-th of the other.
    """
    if is_host_call(group):
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


def twins_of(
    groups: Sequence[KernelGroup], buffers: Mapping[str, Buffer]
) -> dict[str, tuple[str, ...]] | None:
    """For each buffer of the first group, the corresponding buffers of all groups.

    None where groups differ in more than the names of buffers.
    """
    found = [key for group in groups if (key := group_key(group, buffers)) is not None]
    if len(found) < len(groups) or len({key for key, _ in found}) > 1:
        return None
    names = [names for _, names in found]
    return dict(zip(names[0], zip(*names, strict=True), strict=True))


def _names(group: KernelGroup) -> list[str]:
    """The buffers that a group writes and reads, in an order that its structure determines."""
    found: list[str] = []

    def of_node(node: Node) -> Node:
        found.extend((*outputs_of(node), *inputs_of(node)))
        return node

    def of_member(member: Member) -> Member:
        found.extend((member.output, *(load.buffer for load in loads_of(member.body))))
        return member

    map_group(group, of_node, of_member)
    return found


def rename_group(group: _Group, names: Mapping[str, str]) -> _Group:
    """The group with buffers renamed; none of its nodes runs on the host."""

    def member(found: Member) -> Member:
        return replace(found, output=names[found.output], body=rename_loads(found.body, names))

    return map_group(group, lambda node: rename_node(node, names), member)


def rename_node(node: _Node, names: Mapping[str, str]) -> _Node:
    """The node with buffers renamed."""
    made = map_bodies(node, lambda body: rename_loads(body, names))
    changed = {field: _rename_outputs(getattr(node, field), names) for field in node.OUTPUTS}
    changed |= {field: _rename_input(getattr(node, field), names) for field in node.INPUTS}
    return replace(made, **changed)


def _rename_outputs(value: Any, names: Mapping[str, str]) -> Any:
    """A field of `Node.OUTPUTS`."""
    if isinstance(value, tuple):
        return tuple(names[name] for name in value)
    return None if value is None else names[value]


def _rename_input(value: Any, names: Mapping[str, str]) -> Any:
    """A field of `Node.INPUTS`; strings among arguments are constants."""
    return names[value] if isinstance(value, str) else rename_buffers(value, names)


def rename_loads(body: Scalar, names: Mapping[str, str]) -> Scalar:
    """A body that loads other buffers; those that have no new name stay."""

    def change(scalar: Scalar) -> Scalar | None:
        if isinstance(scalar, Load) and scalar.buffer in names:
            return Load(names[scalar.buffer], scalar.index, scalar.dtype)
        return None

    return rewrite(body, change)
