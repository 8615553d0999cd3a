"""Where the bits of packed integers lie: levels of a weight, of an expression that extracts them.

A run of `CHUNK` elements is evaluated bit by bit: each bit of each element's integer is a bit of a
word in memory, or 0, or a copy of the sign. Whatever shifts and masks an expression has, what it
extracts is known then, and can be extracted for four elements at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..dtypes import DType, Kind
from ..symbolic.sizes import (
    Expr,
    Symbol,
    delinearize,
    iteration,
    linearize,
    substitute,
)
from .access import is_multiple_of, load_index
from .buffers import Buffer
from .scalar import Const, Index, Load, Op, Scalar

CHUNK = 32
"""Elements of a row that an invocation multiplies together."""

BYTES = 4
"""Elements of one operation on integers: bytes of a word."""

_WORD = 32
_PAIR = 2 * BYTES

Quad = tuple[int, int, int, int]
"""Four elements of a chunk, in the order of the bytes of a word."""

# Of bytes, and of fields of four bits, of which a byte has two.
_ORDERS: tuple[tuple[Quad, Quad], ...] = (
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 2, 4, 6), (1, 3, 5, 7)),
)


@dataclass(frozen=True, slots=True)
class LevelPart:
    """Neighbouring bits of levels, in the words of one buffer.

    Attributes:
        load: one that reads such a word; its index is of no meaning.
        address: the first word's, in elements of the buffer, of the symbols of rows and `chunk_of`.
        words: that hold the bits of a chunk.
        places: of each element the lowest bit, counted from the lowest one of the first word.
        width: bits.
        shift: of the lowest one in the level.
    """

    load: Load
    address: Expr
    words: int
    places: tuple[int, ...]
    width: int
    shift: int


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of a chunk: integers of at most eight bits.

    Attributes:
        parts: that together have all bits.
        width: bits.
        signed: whether they are in two's complement.
        order: the two quads of which each eight elements consist, by numbers below eight.
    """

    parts: tuple[LevelPart, ...]
    width: int
    signed: bool
    order: tuple[Quad, Quad]


def chunk_of(length: int) -> Expr:
    """The number of a chunk in a row of so many elements."""
    return iteration("chunk", length // CHUNK)


def at_element(
    elements: Sequence[Expr], symbols: Sequence[Symbol], flat: Expr
) -> dict[Symbol, Expr]:
    """The values of the symbols of a row's elements at the element of this number."""
    return dict(zip(symbols, delinearize(flat, elements), strict=True))


def packed_levels(
    node: Scalar,
    elements: Sequence[Expr],
    symbols: Sequence[Symbol],
    length: int,
    buffers: Mapping[str, Buffer],
) -> Levels | None:
    """The levels that an integer expression has in each chunk of a row; None if it has others.

    Args:
        elements, symbols: of the row, whose number of elements is ``length``.
    """
    chunk = chunk_of(length)
    numbers = []
    for element in range(CHUNK):
        point = at_element(elements, symbols, chunk * CHUNK + element)
        bits = _Evaluation(point, buffers).bits(node)
        if bits is None:
            return None
        numbers.append(bits)
    return _levels(numbers, buffers)


# -- bits ------------------------------------------------------------------------------------------

# A bit in memory: the load, the address in elements, and its number in the element.
_Bit = tuple[Load, Expr, int]
_Bits = tuple[_Bit | None, ...]


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Evaluates expressions of integers at one element."""

    point: Mapping[Symbol, Expr]
    buffers: Mapping[str, Buffer]

    def bits(self, node: Scalar) -> _Bits | None:
        """The bits of an integer of at most 32 bits, the lowest first; None if they are unknown."""
        if node.dtype.kind not in (Kind.SIGNED, Kind.UNSIGNED) or node.dtype.bits > _WORD:
            return None
        match node:
            case Load():
                return self._loaded(node)
            case Op("cast", (inner,)) if inner.dtype.bits <= _WORD:
                found = self.bits(inner)
                return None if found is None else _fitted(found, node.dtype)
            case Op("bitwise_or", (left, right)):
                return _joined(self.bits(left), self.bits(right))
            case Op("bitwise_and" | "shift_left" | "shift_right", (inner, operand)):
                found, number = self.bits(inner), self._number(operand)
                if found is None or number is None:
                    return None
                return _changed(node.name, found, number, node.dtype)
        return None

    def _loaded(self, load: Load) -> _Bits | None:
        index, buffer = load_index(load), self.buffers.get(load.buffer)
        if index is None or buffer is None:
            return None
        address = linearize(index, buffer.strides) + buffer.offset
        address = substitute(address, self.point)
        own: _Bits = tuple((load, address, bit) for bit in range(load.dtype.bits))
        return _fitted(own, load.dtype)

    def _number(self, node: Scalar) -> int | None:
        """An integer that is known at the element."""
        match node:
            case Const(int() as value):
                return value
            case Op("cast", (Index(expr),)) | Index(expr):
                known = substitute(expr, self.point)
                return int(known) if known.is_constant else None
        return None


def _fitted(bits: _Bits, dtype: DType) -> _Bits:
    """Bits as an integer of this dtype has them, up to the 32nd."""
    own = bits[: dtype.bits]
    above = own[-1] if dtype.kind is Kind.SIGNED else None
    return own + (above,) * (_WORD - len(own))


def _joined(left: _Bits | None, right: _Bits | None) -> _Bits | None:
    if left is None or right is None:
        return None
    if any(a is not None and b is not None for a, b in zip(left, right, strict=True)):
        return None
    return tuple(b if a is None else a for a, b in zip(left, right, strict=True))


def _changed(name: str, bits: _Bits, number: int, dtype: DType) -> _Bits | None:
    if name == "bitwise_and":
        return tuple(bit if number >> k & 1 else None for k, bit in enumerate(bits))
    if not 0 <= number < dtype.bits:
        return None
    if name == "shift_left":
        return _fitted((None,) * number + bits[: _WORD - number], dtype)
    above = bits[-1] if dtype.kind is Kind.SIGNED else None
    return bits[number:] + (above,) * number


# -- levels ----------------------------------------------------------------------------------------


def _levels(numbers: Sequence[_Bits], buffers: Mapping[str, Buffer]) -> Levels | None:
    shape = _shape(numbers[0])
    if shape is None:
        return None
    width, signed, runs = shape
    if any(_shape(bits) != shape for bits in numbers[1:]):
        return None
    parts = []
    for start, end in runs:
        part = _part([bits[start] for bits in numbers], end - start, start)
        if part is None:
            return None
        parts.append(part)
    order = _order(parts)
    return None if order is None else Levels(tuple(parts), width, signed, order)


_Shape = tuple[int, bool, tuple[tuple[int, int], ...]]


def _shape(bits: _Bits) -> _Shape | None:
    """Width, whether there is a sign, and the runs of bits that are neighbours in memory."""
    width = _WORD
    while width > 1 and bits[width - 2] == bits[-1]:
        width -= 1
    signed = bits[-1] is not None
    width -= not signed
    own = bits[:width]
    if not 0 < width <= 8 or None in own:
        return None
    runs, start = [], 0
    for k in range(1, width + 1):
        if k == width or _next(own[k - 1]) != own[k]:
            runs.append((start, k))
            start = k
    return width, signed, tuple(runs)


def _next(bit: _Bit | None) -> _Bit | None:
    return None if bit is None else (bit[0], bit[1], bit[2] + 1)


def _part(lowest: Sequence[_Bit | None], width: int, shift: int) -> LevelPart | None:
    """The part of which each element has its lowest bit there."""
    found = [bit for bit in lowest if bit is not None]
    load, first, _ = found[0]
    steps = [address - first for _, address, _ in found]
    if len(found) < CHUNK or not all(step.is_constant for step in steps):
        return None
    if any((other.buffer, other.dtype) != (load.buffer, load.dtype) for other, _, _ in found):
        return None
    least = min(step.constant for step in steps)
    address, bits = first + least, load.dtype.bits
    if not is_multiple_of(address, _WORD // bits):
        return None
    places = tuple(
        (step.constant - least) * bits + bit for step, (_, _, bit) in zip(steps, found, strict=True)
    )
    if any(place % 8 + width > 8 for place in places):
        return None
    return LevelPart(load, address, max(places) // _WORD + 1, places, width, shift)


def _order(parts: Sequence[LevelPart]) -> tuple[Quad, Quad] | None:
    """The quads in which most of the parts are in bytes of words as they are."""
    found: tuple[Quad, Quad] | None = None
    most = 0
    for order in _ORDERS:
        steps = [spacing(part, quad) for part in parts for quad in quads_of(order)]
        total = 0 if None in steps else sum(step or 0 for step in steps)
        if total > most:
            found, most = order, total
    return found


def quads_of(order: tuple[Quad, Quad]) -> list[Quad]:
    """All quads of a chunk."""
    return [
        (start + a, start + b, start + c, start + d)
        for start in range(0, CHUNK, _PAIR)
        for a, b, c, d in order
    ]


def spacing(part: LevelPart, quad: Quad) -> int | None:
    """Bits from each of a quad's elements to the next one: 8, or 4 or 2, which can be spread.

    Those lie in one half of a word, or in one byte.
    """
    first, *others = (part.places[element] for element in quad)
    step = others[0] - first
    if any(place - first != (k + 1) * step for k, place in enumerate(others)):
        return None
    if step not in (8, 4, 2) or part.width > step:
        return None
    start = first % _WORD - first % step
    return step if start % (BYTES * step) == 0 else None
