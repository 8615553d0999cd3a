"""The common part of all nodes: iteration symbols, origins, scalars over spaces."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import ClassVar

from ..symbolic.sizes import ONE, Expr, IntLike, Symbol, as_symbol, iteration, symbols_of
from .buffers import Buffer
from .scalar import Scalar


def iteration_symbols(prefix: str, sizes: Sequence[IntLike]) -> tuple[Expr, ...]:
    """``prefix0 < sizes[0]``, ``prefix1 < sizes[1]``, …"""
    return tuple(iteration(f"{prefix}{k}", size) for k, size in enumerate(sizes))


Space = tuple[tuple[str, tuple[Expr, ...]], ...]
"""Groups of iteration symbols: a prefix, and the sizes that it is numbered over."""


def symbol_keys(symbols: Sequence[Expr]) -> tuple[Symbol, ...]:
    """The `Symbol`s behind symbol expressions."""
    keys = []
    for expr in symbols:
        key = as_symbol(expr)
        assert key is not None, expr
        keys.append(key)
    return tuple(keys)


def numbered(prefix: str, sizes: Sequence[IntLike]) -> tuple[Symbol, ...]:
    """The `Symbol`s of `iteration_symbols`."""
    return symbol_keys(iteration_symbols(prefix, sizes))


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a node: an ATen overload and the user's line of code ("" when unknown)."""

    op: str
    source: str = ""


Rule = tuple[bool, str]
"""Whether it holds, and what a node needs: see `Node.rules`."""


@dataclass(frozen=True, slots=True)
class Node:
    """The protocol of all nodes: a node's description of itself, for passes over nodes.

    A node is frozen data: names of buffers, sizes, numbers, scalars and index expressions, the
    latter two computed at every point of a space. The functions of `nodes` go through them.
    """

    OUTPUTS: ClassVar[tuple[str, ...]] = ("output",)
    """Fields that name buffers that it writes: a name, a tuple of names, or None."""

    INPUTS: ClassVar[tuple[str, ...]] = ()
    """Fields that name buffers that it reads as a whole, beside what its bodies load: a name, None,
    or nested tuples with `HostBuffer`s.
    """

    TILED: ClassVar[bool] = False
    """Whether its kernel computes an element of its bodies many times, once for each tile."""

    origins: tuple[Origin, ...] = field(default=(), kw_only=True)
    """The operators that the node was lowered from."""

    @property
    def spaces(self) -> dict[str, Space]:
        """The space of each field with a scalar, an index expression, a tuple of them or None."""
        return {}

    @property
    def locals(self) -> Mapping[str, tuple[str, ...]]:
        """By field whose bodies use numbers that the node computes, the names of these numbers."""
        return {}

    @property
    def extents(self) -> tuple[Expr, ...]:
        """Sizes whose product is the number of steps that it takes."""
        groups = dict(group for space in self.spaces.values() for group in space)
        return tuple(size for sizes in groups.values() for size in sizes)

    @property
    def mnemonic(self) -> str:
        """The node's name in texts."""
        return re.sub("(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def rules(self, buffers: Mapping[str, Buffer]) -> Iterator[Rule]:
        """Rules of the node, beside those of all: symbols of the spaces, declared buffers.

        Those after one that does not hold are not asked for. ``buffers`` are the graph's, by name.
        """
        yield from ()


@dataclass(frozen=True, slots=True)
class Anchor(Node, ABC):
    """A node from whose result its kernel goes on to compute pointwise members, point by point."""

    output: str

    @property
    @abstractmethod
    def points(self) -> Space:
        """The points of its result."""

    @property
    def symbols(self) -> tuple[Expr, ...]:
        """The iteration symbols of `points`."""
        return tuple(s for prefix, sizes in self.points for s in iteration_symbols(prefix, sizes))

    @property
    def result_index(self) -> tuple[Expr, ...]:
        """The logical index in the output that a point computes."""
        return self.symbols


def operands_of(node: Node) -> tuple[str, ...]:
    """The fields that the text of a node shows, in order: those that its ``repr`` does."""
    names = (field.name for field in fields(node) if field.repr)
    return tuple(name for name in names if name not in (*node.OUTPUTS, "origins"))


def named_bodies(node: Node) -> dict[str, Scalar]:
    """The scalars that a node has one by one, by field."""
    values = {name: getattr(node, name) for name in node.spaces}
    return {name: v for name, v in values.items() if v is not None and not isinstance(v, tuple)}


def shape_rule(buffer: Buffer, sizes: Sequence[Expr]) -> Rule:
    """The rule that an output has these sizes."""
    return buffer.sizes == tuple(sizes), f"ranges {buffer.sizes} of its output"


def dtype_rule(body: Scalar, buffer: Buffer) -> Rule:
    """The rule that an output has the dtype of a body."""
    return body.dtype is buffer.dtype, f"a body of {buffer.dtype}, not {body.dtype}"


def index_rules(index: Sequence[Expr], space: Space, buffer: Buffer) -> Iterator[Rule]:
    """The rules that results over a space are written to distinct places of an output."""
    yield len(index) == len(buffer.sizes), "an index per dimension"
    used = frozenset().union(*map(symbols_of, index))
    for symbol in symbols_in(space):
        yield symbol.extent is ONE or symbol in used, f"{symbol} in its output index"


@lru_cache(maxsize=1 << 12)
def symbols_in(space: Space) -> tuple[Symbol, ...]:
    """The iteration symbols of a space."""
    return tuple(key for prefix, sizes in space for key in numbered(prefix, sizes))
