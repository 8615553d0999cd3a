"""Data of rendering: expressions, scopes of statements, unique names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..dtypes import DType, int64_in_words
from ..symbolic.sizes import Expr


def vector_type(dtype: DType, lanes: int) -> str:
    """The WGSL type of so many values; of integers in words, which are vectors, an array."""
    if lanes == 1:
        return dtype.compute
    in_array = dtype is int64_in_words
    return f"array<{dtype.compute}, {lanes}>" if in_array else f"vec{lanes}<{dtype.compute}>"


def in_lanes(dtype: DType, codes: Sequence[str]) -> str:
    """A value of several lanes as an expression."""
    return f"{vector_type(dtype, len(codes))}({', '.join(codes)})"


@dataclass(frozen=True, slots=True)
class Text:
    """A WGSL expression: a name or literal, ``lanes`` wide (1 or 4).

    ``narrow`` is an i32 expression of the same value, when there is one.
    """

    code: str
    lanes: int
    dtype: DType
    narrow: str = ""

    def lane(self, k: int) -> str:
        """One lane as a scalar expression."""
        if self.lanes == 1:
            return self.code
        return f"{self.code}[{k}]" if self.dtype is int64_in_words else f"{self.code}.{'xyzw'[k]}"

    def widen(self, lanes: int) -> str:
        """The value as an expression of ``lanes`` lanes."""
        if lanes == self.lanes:
            return self.code
        if self.dtype is int64_in_words:
            return f"tw_words_repeat_x{lanes}({self.code})"
        return f"{vector_type(self.dtype, lanes)}({self.code})"


def choice(condition: Text, yes: str, no: str, lanes: int, dtype: DType) -> str:
    """One of two values of so many lanes, or one of two in each lane, as an expression."""
    if lanes > 1 and dtype is int64_in_words:
        return f"tw_words_where_x{lanes}({condition.widen(lanes)}, {yes}, {no})"
    return f"select({no}, {yes}, {condition.code})"


@dataclass(frozen=True, slots=True)
class Gather:
    """A coordinate computed from data: its value, and the stride and size of its dimension.

    ``inside``: what makes an index of the value {0} that is in range, whose largest is {1}.
    """

    value: Text
    stride: Expr
    size: Expr
    inside: str


SomeText = TypeVar("SomeText", Text, Text | None)


@dataclass
class Scope:
    """An open list of statements and what is already computed in it (or in a parent)."""

    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    known: dict[object, Text] = field(default_factory=dict)

    def find(self, key: object) -> Text | None:
        """The value known under ``key`` in this scope or in one around it, or None."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.known.get(key)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def once(self, key: object, make: Callable[[], SomeText]) -> SomeText:
        """The value known under a key, or the result of ``make``, which is known from now on."""
        found = self.find(key)
        if found is not None:
            return found
        made = make()
        if made is not None:
            self.known[key] = made
        return made


@dataclass
class UniqueNames:
    """Unique names within a kernel."""

    count: int = 0

    def fresh(self, prefix: str) -> str:
        """``prefix`` and a number that no other name of the kernel has."""
        self.count += 1
        return f"{prefix}{self.count - 1}"
