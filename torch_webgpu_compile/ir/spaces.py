"""What nodes of every kind have: iteration symbols, origins, scalars with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..sizes import Expr, IntLike, Symbol, as_symbol, iteration
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


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from: an ATen overload and the user's line of code ("" when unknown)."""

    op: str
    source: str = ""


class HasBodies(Protocol):
    """A node of several scalars, each with a name and a space of its own."""

    BODIES: ClassVar[tuple[str, ...]]


def named_bodies(node: HasBodies) -> dict[str, Scalar]:
    """Those of a node's ``BODIES`` that it has, by field."""
    bodies = {name: getattr(node, name) for name in node.BODIES}
    return {name: body for name, body in bodies.items() if body is not None}
