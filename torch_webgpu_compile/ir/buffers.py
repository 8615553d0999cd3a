"""`Buffer`: the typed memory that nodes read and write."""

from __future__ import annotations

import enum
from collections.abc import Container
from dataclasses import dataclass

from ..dtypes import DType
from ..symbolic.sizes import ZERO, Expr, contiguous_strides, product
from ..target import Target, Window


class BufferOrigin(enum.Enum):
    """The source of a buffer's contents.

    PREPARED: from `Program.prepared`. EFFECT: nowhere; it is an empty buffer without memory,
    the only output of a host call that is made for its effect, such as a check that raises.
    """

    INPUT = "input"
    CONSTANT = "constant"
    INTERMEDIATE = "intermediate"
    PREPARED = "prepared"
    EFFECT = "effect"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Typed memory with a layout.

    Attributes:
        sizes: logical sizes, in elements.
        strides: per dimension, in elements, ≥ 0; the first element is at ``offset``.
        offset: in elements, from the start of the memory.
        shares: the buffer whose memory it takes over, and which nothing reads from then on: a
            `Scatter` writes it where its initial contents are, a map over an input.
    """

    name: str
    dtype: DType
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr
    origin: BufferOrigin
    shares: str | None = None

    @property
    def numel(self) -> Expr:
        """The number of logical elements."""
        return product(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether a size is known to be 0."""
        return ZERO in self.sizes

    @property
    def span(self) -> Expr:
        """Elements from the start of the memory to the last one used; 0 when empty.

        A symbolic size that turns out to be 0 may make it negative, which means 0 as well.
        """
        if self.is_empty:
            return ZERO
        last = self.offset
        for size, stride in zip(self.sizes, self.strides, strict=True):
            last = last + (size - 1) * stride
        return last + 1

    @property
    def nbytes(self) -> Expr:
        """Bytes from the start of the memory to the end of the last element, see `span`."""
        return self.span * self.dtype.itemsize

    def windows(self, target: Target) -> tuple[Window, ...]:
        """Bindings through which a kernel reaches all of it; one where its size is not known."""
        nbytes = self.nbytes
        return target.windows(nbytes.constant if nbytes.is_constant else 0)


def unused_name(stem: str, buffers: Container[str]) -> str:
    """``stem``, with a number where a buffer has that name."""
    name, count = stem, 0
    while name in buffers:
        count += 1
        name = f"{stem}_{count}"
    return name


def intermediate(
    name: str, dtype: DType, sizes: tuple[Expr, ...], strides: tuple[Expr, ...] | None = None
) -> Buffer:
    """A buffer that a node of a graph writes, contiguous unless ``strides`` are given."""
    strides = contiguous_strides(sizes) if strides is None else strides
    return Buffer(name, dtype, sizes, strides, ZERO, BufferOrigin.INTERMEDIATE)
