"""Sums of products with packed weights: which reductions of a row group are such sums.

A row of a weight is levels, integers of few bits, of which a group of elements shares a scale and
an offset. Where the other factor is the same for all rows, it can be made integers once, and its
products with levels are those of integers: see `PackedRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, reduce
from operator import mul

from .. import dtypes
from ..dtypes import DType
from ..symbolic.sizes import ONE, iteration, product, symbols_of
from .buffers import Buffer
from .graph import Member, RowGroup
from .packed_levels import CHUNK, Levels, Quad, at_element, packed_levels
from .scalar import (
    Const,
    Index,
    Load,
    Op,
    Scalar,
    cast,
    children,
    loads_of,
    scalar_symbols,
    substitute_symbols,
)
from .spaces import numbered

_GROUPS = (CHUNK, CHUNK // 2)
"""Elements that share scale and offset, the most that is looked for first."""

_MOST_KNOWN = 256
"""Groups whose sums are remembered: what joins, verifies and renders kernels asks for each."""


@dataclass(frozen=True, slots=True)
class PackedSum:
    """A member that is Σ factor · (level · scale + offset).

    Attributes:
        output: the member's.
        factor: the same for all rows.
        levels: of the weight.
        zero: what is taken from each level.
        scale: of a group, None for 1.
        offset: of a group, None for 0.
        group: elements that share scale and offset; it divides `CHUNK`.
    """

    output: str
    factor: Scalar
    levels: Levels
    zero: int
    scale: Scalar | None
    offset: Scalar | None
    group: int


@dataclass(frozen=True, slots=True)
class PackedSums:
    """The reductions of a row group that multiplies with packed weights.

    Attributes:
        sums: that have one factor and one order.
        statistics: sums over what is the same for all rows, by their members.
    """

    sums: tuple[PackedSum, ...]
    statistics: tuple[str, ...]

    @property
    def factor(self) -> Scalar:
        """What is multiplied with all of the weights."""
        return self.sums[0].factor

    @property
    def order(self) -> tuple[Quad, Quad]:
        """See `Levels`."""
        return self.sums[0].levels.order


def packed_sums(group: RowGroup, buffers: Mapping[str, Buffer]) -> PackedSums | None:
    """The reductions of a group, if all are sums with packed weights and what these need."""
    reductions = [m for m in group.members if m.reduction]
    is_float = all(m.reduction == "sum" and m.body.dtype is dtypes.float32 for m in reductions)
    length = product(group.elements)
    if not is_float or not length.is_constant or int(length) % CHUNK or not int(length):
        return None
    if not any(_has_integers(m.body) for m in reductions):
        return None
    names = {load.buffer for m in group.members for load in loads_of(m.body)}
    return _packed_sums(group, tuple((n, buffers[n]) for n in sorted(names) if n in buffers))


@lru_cache(_MOST_KNOWN)
def _packed_sums(group: RowGroup, given: tuple[tuple[str, Buffer], ...]) -> PackedSums | None:
    recogniser = _Recogniser(group, dict(given))
    sums, statistics = [], []
    for member in group.members:
        if not member.reduction:
            continue
        if recogniser.is_same_for_rows(member.body):
            statistics.append(member.output)
            continue
        found = recogniser.packed_sum(member)
        if found is None:
            return None
        sums.append(found)
    if not sums:
        return None
    first = sums[0]
    if any((s.factor, s.levels.order) != (first.factor, first.levels.order) for s in sums):
        return None
    return PackedSums(tuple(sums), tuple(statistics))


def _has_integers(body: Scalar) -> bool:
    """Whether a load of integers is somewhere in a product: most bodies are asked only this."""
    pending, seen = [body], {body}
    while pending:
        node = pending.pop()
        if isinstance(node, Load) and node.dtype.is_integer:
            return True
        new = [child for child in children(node) if child not in seen]
        seen.update(new)
        pending += new
    return False


# (level, zero, scale, offset) of level · scale + offset, in which level lacks its zero.
_Affine = tuple[Scalar, int, Scalar | None, Scalar | None]


class _Recogniser:
    """Finds the parts of the bodies of one group."""

    def __init__(self, group: RowGroup, buffers: Mapping[str, Buffer]) -> None:
        self.elements = group.elements
        self.length = int(product(group.elements))
        self.buffers = buffers
        self.members = {m.output: m for m in group.members}
        self.symbols = numbered("r", group.elements)
        rows = [s for s in numbered("i", group.rows) if s.extent is not ONE]
        self.is_same_for_rows = self._independent_of(frozenset(rows))

    def packed_sum(self, member: Member) -> PackedSum | None:
        """The parts of one sum, or None."""
        own: list[Scalar] = []
        shared: list[Scalar] = []
        for factor in _factors(member.body):
            (shared if self.is_same_for_rows(factor) else own).append(factor)
        if not shared or not own or any(self._loads_members(factor) for factor in own):
            return None
        for size in _GROUPS:
            found = self._affine(reduce(mul, own), self._constant_in(size))
            if found is None:
                continue
            level, zero, scale, offset = found
            levels = packed_levels(level, self.elements, self.symbols, self.length, self.buffers)
            if levels is not None:
                factor = reduce(mul, shared)
                return PackedSum(member.output, factor, levels, zero, scale, offset, size)
        return None

    def _independent_of(self, symbols: frozenset[object]) -> Callable[[Scalar], bool]:
        """Tells what has one value for all values of these symbols; members as they are made."""

        @cache
        def is_independent(node: Scalar) -> bool:
            if isinstance(node, Index):
                return symbols_of(node.expr).isdisjoint(symbols)
            if isinstance(node, Load) and node.buffer in self.members:
                member = self.members[node.buffer]
                if member.reduction is not None or not any(map(scalar_symbols, node.index)):
                    return False
                return is_independent(member.body)
            return all(map(is_independent, children(node)))

        return is_independent

    def _loads_members(self, node: Scalar) -> bool:
        if isinstance(node, Load) and node.buffer in self.members:
            return True
        return any(map(self._loads_members, children(node)))

    def _constant_in(self, size: int) -> Callable[[Scalar], bool]:
        """Tells what has one value in each ``size`` elements of a row."""
        inner = iteration("inner", size)
        flat = iteration("chunk", self.length // size) * size + inner
        point = at_element(self.elements, self.symbols, flat)

        @cache
        def is_constant(node: Scalar) -> bool:
            if isinstance(node, Index):
                return symbols_of(inner).isdisjoint(scalar_symbols(substitute_symbols(node, point)))
            return all(map(is_constant, children(node)))

        return is_constant

    def _affine(self, node: Scalar, is_constant: Callable[[Scalar], bool]) -> _Affine | None:
        """The parts of an expression of floats that is affine in one of integers."""
        match node:
            case Op("cast", (inner,)) if inner.dtype.is_float and _has_levels(inner, node.dtype):
                return self._affine(inner, is_constant)
            case Op("cast", (inner,)) if inner.dtype.is_integer and _has_all_levels(node.dtype):
                return _integer(inner, is_constant)
            case Op("neg", (inner,)):
                found = self._affine(inner, is_constant)
                return None if found is None else _scaled(found, Const(-1.0, dtypes.float32))
            case Op("mul", (left, right)):
                if is_constant(left):
                    left, right = right, left
                found = self._affine(left, is_constant) if is_constant(right) else None
                return None if found is None else _scaled(found, right)
            case Op("add" | "sub" as name, (left, right)):
                if is_constant(right):
                    found = self._affine(left, is_constant)
                    return (
                        None if found is None else _moved(found, right if name == "add" else -right)
                    )
                found = self._affine(right, is_constant) if is_constant(left) else None
                if found is not None and name == "sub":
                    found = _scaled(found, Const(-1.0, dtypes.float32))
                return None if found is None else _moved(found, left)
        return None


def _factors(node: Scalar) -> list[Scalar]:
    if isinstance(node, Op) and node.name == "mul":
        return [factor for arg in node.args for factor in _factors(arg)]
    return [node]


def _has_all_levels(dtype: DType) -> bool:
    """Whether floats have all integers that levels are: bfloat16 has those up to 256."""
    return dtype in (dtypes.float32, dtypes.float16, dtypes.bfloat16)


def _has_levels(inner: Scalar, dtype: DType) -> bool:
    """Whether a float is a level in another dtype, in which it is the same number."""
    is_level = isinstance(inner, Op) and inner.name == "cast" and inner.args[0].dtype.is_integer
    return is_level and _has_all_levels(dtype)


def _integer(node: Scalar, is_constant: Callable[[Scalar], bool]) -> _Affine | None:
    """The parts of an integer: a level, from which a constant or one of a group may be taken."""
    match node:
        case Op("sub" | "add" as name, (level, Const(int() as value))):
            return level, value if name == "sub" else -value, None, None
        case Op("sub" | "add" as name, (level, operand)) if is_constant(operand):
            if not (isinstance(operand, Op) and operand.name == "cast"):
                return None
            if operand.args[0].dtype.bits > 16:
                return None  # the difference may wrap
            moved = cast(operand, dtypes.float32)
            return level, 0, None, -moved if name == "sub" else moved
    return node, 0, None, None


def _scaled(found: _Affine, factor: Scalar) -> _Affine:
    level, zero, scale, offset = found
    scale = factor if scale is None else scale * factor
    return level, zero, scale, None if offset is None else offset * factor


def _moved(found: _Affine, term: Scalar) -> _Affine:
    level, zero, scale, offset = found
    return level, zero, scale, term if offset is None else offset + term
