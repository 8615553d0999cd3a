"""Values nested in tuples: arguments of operators that run on the host, and fields of nodes.

The arguments of an operator are None, booleans, numbers, strings, sizes (`Expr`), `HostBuffer`s and
tuples of these, in a graph (`ir.nodes.HostCall`) and in a plan (`plan.model.HostStep`) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A tensor argument: the contents of the buffer of this name."""

    buffer: str


def leaves(value: Any) -> Iterator[Any]:
    """What tuples hold that is no tuple, depth first; the value itself if it is none."""
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Tuples nested alike, with ``change`` of each of the `leaves`."""
    if isinstance(value, tuple):
        return tuple(map_leaves(change, item) for item in value)
    return change(value)


def buffers_in(value: Any) -> tuple[str, ...]:
    """Names of the buffers among arguments, in order."""
    return tuple(leaf.buffer for leaf in leaves(value) if isinstance(leaf, HostBuffer))


def rename_buffers(value: Any, names: Mapping[str, str]) -> Any:
    """The same arguments with other buffers, by name."""

    def renamed(leaf: Any) -> Any:
        return HostBuffer(names[leaf.buffer]) if isinstance(leaf, HostBuffer) else leaf

    return map_leaves(renamed, value)
