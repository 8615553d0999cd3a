"""Values nested in tuples: arguments of operators that run on the host, and fields of nodes.

The arguments of an operator are None, booleans, numbers, strings, sizes (`Expr`), `HostBuffer`s,
`HostView`s and tuples of these, in a graph (`ir.nodes.HostCall`) and in a plan
(`plan.model.HostStep`) alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from .sizes import Expr

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """A tensor argument: the contents of the buffer of this name.

    Attributes:
        strides: those of the tensor that the operator is given, in elements; None: the buffer's.
    """

    buffer: str
    strides: tuple[Expr, ...] | None = None


@dataclass(frozen=True, slots=True)
class HostView:
    """A tensor argument that the operator changes: a part of one of the tensors that it changes.

    Attributes:
        changed: the number of that tensor.
        sizes, strides, offset: of the part, in elements from the tensor's first one.
    """

    changed: int
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, depth first; the value itself if it is no tuple.

    Behind tensor arguments come the sizes that they have.
    """
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
        return
    yield value
    if isinstance(value, HostBuffer):
        yield from value.strides or ()
    elif isinstance(value, HostView):
        yield from (*value.sizes, *value.strides, value.offset)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Tuples nested alike, with ``change`` of each of the `leaves`."""
    if isinstance(value, tuple):
        return tuple(map_leaves(change, item) for item in value)
    if isinstance(value, HostBuffer) and value.strides is not None:
        value = replace(value, strides=map_leaves(change, value.strides))
    elif isinstance(value, HostView):
        sizes, strides = map_leaves(change, (value.sizes, value.strides))
        value = HostView(value.changed, sizes, strides, change(value.offset))
    return change(value)


def map_fields(change: Callable[[Any], Any], record: Record) -> Record:
    """A dataclass with `map_leaves` of each field."""
    made = {f.name: map_leaves(change, getattr(record, f.name)) for f in fields(record)}  # type: ignore[arg-type]
    return replace(record, **made)  # type: ignore[type-var]


def buffers_in(value: Any) -> tuple[str, ...]:
    """Names of the buffers among arguments, in order."""
    return tuple(leaf.buffer for leaf in leaves(value) if isinstance(leaf, HostBuffer))


def rename_buffers(value: Any, names: Mapping[str, str]) -> Any:
    """The same arguments with other buffers, by name."""

    def renamed(leaf: Any) -> Any:
        return replace(leaf, buffer=names[leaf.buffer]) if isinstance(leaf, HostBuffer) else leaf

    return map_leaves(renamed, value)
