"""`Guard`: what a trace assumed of its call: whether its graph computes other calls, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...symbolic.size_classes import SizeClass
from .arguments import MAX_INT, key_of, overlap
from .calls import TensorSpec


@dataclass(frozen=True, slots=True)
class LeafSource:
    """Where an integer or number is found among the leaves of a call."""

    leaf: int
    field: str = ""
    dim: int | None = None

    def read(self, leaves: Sequence[Any]) -> Any:
        return self.of(leaves[self.leaf])

    def of(self, value: Any) -> Any:
        if self.field:
            value = getattr(value, self.field)
        return value if self.dim is None else value[self.dim]

    def __str__(self) -> str:
        return f"leaf{self.leaf}{self.field}{'' if self.dim is None else self.dim}"


@dataclass(frozen=True, slots=True)
class LeafSymbol:
    """A symbol.

    Attributes:
        name: that it has in the guard's expressions.
        place: what it stands for.
        known: the class of sizes, if it is one's.
        is_negative: whether its integers are.
    """

    name: str
    place: LeafSource
    known: SizeClass | None
    is_negative: bool

    def read(self, leaves: Sequence[Any]) -> int | float | None:
        """The value that it stands for; None where it cannot stand for what is there.

        Of integers that are no sizes, 0 and 1 are never symbols, negative ones are a class of
        their own, and all fit into a kernel's parameter. Floats are finite.
        """
        value = self.place.read(leaves)
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if self.known is not None:
            return self.known.count(value) if value <= MAX_INT else None
        alike = -MAX_INT <= value < 0 if self.is_negative else 2 <= value <= MAX_INT
        return value if alike else None


@dataclass(frozen=True, slots=True)
class AlikeNumber:
    """Any number of this type, but for the special ones."""

    kind: type
    special: frozenset[float]

    def __call__(self, leaf: Any) -> bool:
        return type(leaf) is self.kind and leaf not in self.special


@dataclass(frozen=True, slots=True)
class AlikeLeaf:
    """The same leaf, as `key_of` has it."""

    key: Any

    def __call__(self, leaf: Any) -> bool:
        return bool(key_of(leaf) == self.key)


@dataclass(frozen=True, slots=True)
class AlikeTensor:
    """A tensor of these elements (dtype, conj, neg) and rank, with some fixed sizes or strides."""

    elements: tuple[torch.dtype, bool, bool]
    rank: int
    fixed: tuple[tuple[LeafSource, int], ...]

    def __call__(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, TensorSpec)
            and (leaf.dtype, leaf.conj, leaf.neg) == self.elements
            and len(leaf.sizes) == self.rank
            and all(place.of(leaf) == value for place, value in self.fixed)
        )


Alike = AlikeNumber | AlikeLeaf | AlikeTensor


@dataclass(frozen=True)
class Guard:
    """What a trace assumed of the leaves of its call.

    Attributes:
        alike: what is asked of each leaf that is not one of the symbols.
        symbols: what may differ.
        conditions: of their values, as Python expressions of the names.
        derived: sizes and strides that follow from them, in the same way.
        mutated: the leaves that the call changes, which may not share memory.
    """

    alike: tuple[Alike, ...]
    symbols: tuple[LeafSymbol, ...]
    conditions: tuple[str, ...]
    derived: tuple[tuple[LeafSource, str], ...]
    mutated: tuple[int, ...]

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether all of it is true of other leaves: see `CallInterface.accepts`."""
        if len(leaves) != len(self.alike):
            return False
        if not all(is_alike(leaf) for is_alike, leaf in zip(self.alike, leaves, strict=True)):
            return False
        values = [symbol.read(leaves) for symbol in self.symbols]
        condition, derived = self._functions
        if None in values or not condition(*values):
            return False
        if [place.read(leaves) for place, _ in self.derived] != derived(*values):
            return False
        return not overlap([leaves[k] for k in self.mutated])

    @cached_property
    def _functions(self) -> tuple[Callable[..., bool], Callable[..., list[int]]]:
        """The conditions, and what follows from sizes, as functions of the symbols."""
        names = ", ".join(symbol.name for symbol in self.symbols)
        conditions = " and ".join(f"({text})" for text in self.conditions)
        derived = ", ".join(text for _, text in self.derived)
        scope = {"math": math, "torch": torch}
        condition = eval(f"lambda {names}: {conditions or 'True'}", scope)
        return condition, eval(f"lambda {names}: [{derived}]", scope)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_functions"}


def all_leaves(leaves: Sequence[Any]) -> bool:
    """The guard of a trace that assumed nothing."""
    return True
