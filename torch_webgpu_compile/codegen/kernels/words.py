"""How contractions of bytes load tiles of their operands: as words of four inner neighbours.

The sum over four of them is one operation in WGSL (``dot4I8Packed``, ``dot4U8Packed``), and they
lie so in memory, if the inner dimension is the fastest one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import dtypes
from ...ir.access import VECTOR, Lanes, is_multiple_of
from ...ir.nodes import Contraction
from ...ir.scalar import Const, Index, Load, Masked, Op, Scalar
from ...ir.spaces import symbol_keys
from ...symbolic.sizes import Expr, Symbol, ceildiv, iteration, product
from ..values import Scope
from .builder import KernelBuilder
from .operands import TileLoad, guards_of, points_of

_PER_ACCESS = VECTOR * VECTOR


def load_words(
    builder: KernelBuilder,
    node: Contraction,
    body: Scalar,
    outer: tuple[str, Sequence[Expr]],
    axis: str,
    tile: int,
    inner_tile: int,
) -> TileLoad:
    """How a kernel loads words of an operand; see `load_operand`.

    Args:
        axis: of the problem, see `problem_of`.
        inner_tile: words of a tile along the inner dimension.
    """
    assert isinstance(body, Op)
    outer_count, inner_count = product(outer[1]), product(node.inner)
    words = ceildiv(inner_count, VECTOR)
    points = points_of(node, outer)
    flat = iteration("flat", words * VECTOR)
    (flat_symbol,) = symbol_keys([flat])

    def at(o: Expr, i: Expr) -> dict[Symbol, Expr]:
        return {**points(o, i), flat_symbol: i}

    is_whole = is_multiple_of(inner_count, VECTOR)
    inside = None if is_whole else Op("lt", (Index(flat), Index(inner_count)), dtypes.bool_)
    loading = _Loading(builder, body, inside)
    limits = outer_count, words
    if axis == "inner":
        limits = outer_count, words // VECTOR
    elif axis == "outer":
        limits = outer_count // VECTOR, words
    o, i = iteration(outer[0], limits[0]), iteration("k", limits[1])
    if axis == "inner":
        result = loading.words([at(o, i * _PER_ACCESS + x) for x in range(_PER_ACCESS)])
    elif axis == "outer":
        across = [at(o * VECTOR + n, i * VECTOR + x) for x in range(VECTOR) for n in range(VECTOR)]
        result = f"tw_bytes_transposed({loading.words(across)})"
    else:
        result = loading.word([at(o, i * VECTOR + x) for x in range(VECTOR)])
    are_whole = is_multiple_of(outer_count, tile), is_multiple_of(words, inner_tile)
    guards = guards_of(builder, outer[0], limits, are_whole)
    type = "u32" if axis.startswith("scalar") else "vec4<u32>"
    return TileLoad(
        axis, loading.lines, result, guards, type, "0u" if type == "u32" else f"{type}(0u)"
    )


class _Loading:
    """The statements that load one operand, which is 0 outside, if that may be."""

    def __init__(self, builder: KernelBuilder, body: Op, inside: Scalar | None) -> None:
        self.builder = builder
        self.memory = body.args[0] if inside is None else None
        self.body = body if inside is None else Masked(inside, body, Const(0, body.dtype))
        self.wide = Scope()
        self.lines: list[str] = []

    def words(self, lanes: Lanes) -> str:
        """A vector of words of four lanes each."""
        whole = self._in_memory(lanes)
        if whole is not None:
            return whole
        fours = [lanes[first : first + VECTOR] for first in range(0, len(lanes), VECTOR)]
        return f"vec4<u32>({', '.join(map(self.word, fours))})"

    def word(self, lanes: Lanes) -> str:
        """Four lanes in a word."""
        whole = self._in_memory(lanes)
        if whole is not None:
            return whole
        own = Scope(parent=self.wide)
        value = self.builder.renderer(lanes, own, wide=self.wide).render(self.body)
        self.lines += [*self.wide.lines, *own.lines]
        self.wide.lines = []
        return f"pack4xI8({value.widen(VECTOR)})"

    def _in_memory(self, lanes: Lanes) -> str | None:
        if not isinstance(self.memory, Load):
            return None
        own = Scope()
        found = self.builder.renderer(lanes, own).words(self.memory)
        self.lines += own.lines
        return None if found is None else found.code
