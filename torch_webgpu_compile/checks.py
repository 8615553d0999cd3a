"""Checks of indices that come from data, which kernels make while they run."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import IndexOutOfRangeError


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """What is checked.

    Attributes:
        op: the ATen overload, e.g. ``aten.gather.default``.
        source: the user's line of code, "" when unknown.
        dim: the dimension that the index is for; None for one into all elements.
    """

    op: str
    source: str = ""
    dim: int | None = None

    def error(self, index: int, size: int) -> IndexOutOfRangeError:
        """The exception for an index, as the user gave it, and the elements that there are."""
        return IndexOutOfRangeError(self.op, index, size, self.dim, self.source)
