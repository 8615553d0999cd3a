"""Products of rows of packed weights with what is the same for all rows, by integers.

See `ir.packed_rows` for the strategy, and ``templates/packed_products.wgsl.jinja`` for what is
around the statements that are made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import dtypes
from ...ir.access import ACCESS_NBYTES, VECTOR, Lanes, flat_environment, is_multiple_of
from ...ir.graph import Member, RowGroup
from ...ir.packed_levels import (
    BYTES,
    CHUNK,
    LevelPart,
    Quad,
    at_element,
    chunk_of,
    quads_of,
    spacing,
)
from ...ir.packed_rows import PLANES, SHARE, PackedRows, center, needs_sum
from ...ir.packed_sums import PackedSum
from ...ir.scalar import Load, const
from ...ir.spaces import iteration_symbols, symbol_keys
from ...symbolic.sizes import ZERO, Expr, Symbol, iteration, product, substitute, symbols_of
from ..values import Scope, Text
from ..wgsl.buffer_access import WORD_NBYTES
from ..wgsl.literals import literal
from ..wgsl.scalars import Renderer
from .accumulate import Accumulator, accumulator
from .builder import KernelBuilder
from .rounding import Rounding

_SIGN_BITS = "0x80808080u"
_SPREAD = {4: "tw_spread_nibbles", 2: "tw_spread_pairs"}


@dataclass(frozen=True, slots=True)
class _Group:
    """The scale and the offset of a group as expressions, "" for none."""

    scale: str
    offset: str


class PackedProducts:
    """The sums of a row group while they are made.

    Args:
        order: of the symbols of rows; see `flat_environment`.
        workgroup: invocations.
    """

    def __init__(
        self,
        group: RowGroup,
        builder: KernelBuilder,
        packed: PackedRows,
        order: Sequence[int],
        workgroup: int,
    ) -> None:
        self.group = group
        self.builder = builder
        self.packed = packed
        self.workgroup = workgroup
        self.rows = product(group.rows)
        self.row_symbols = symbol_keys(iteration_symbols("i", group.rows))
        self.element_symbols = symbol_keys(iteration_symbols("r", group.elements))
        self.order = order
        self.by_name = {m.output: m for m in group.members}
        self.rounding = Rounding(group.members, builder.buffers)
        self.length = int(product(group.elements))
        self.chunks = self.length // CHUNK
        self.blocks = -(-self.chunks // packed.block)
        # The part of the row of which the factor is in workgroup memory.
        self.part = iteration("part", self.blocks) if self.blocks > 1 else ZERO

    # -- names -----------------------------------------------------------------------------------

    def name(self, output: str, row: int | None = None) -> str:
        """The variable of a sum; of one of an invocation's rows while it is added up."""
        number = list(self.by_name).index(output)
        is_own = row is None or self.packed.rows_each == 1
        return f"a{number}" if is_own else f"a{number}_row{row}"

    def accumulators(self) -> list[Accumulator]:
        """The accumulators of all sums."""
        found = self.packed.found
        names = [self.name(s.output, k) for s in found.sums for k in range(self.packed.rows_each)]
        names += [self.name(output) for output in found.statistics]
        return [accumulator(name, "sum", dtypes.float32, 1) for name in names]

    def chosen(self) -> list[str]:
        """Statements that take the sums of the row that an invocation goes on with."""
        each = self.packed.rows_each
        lines = []
        for found in self.packed.found.sums if each > 1 else ():
            code = self.name(found.output, each - 1)
            for row in reversed(range(each - 1)):
                code = f"select({code}, {self.name(found.output, row)}, g % {each} == {row})"
            lines.append(f"let {self.name(found.output)} = {code};")
        return lines

    def inputs(self) -> dict[str, Any]:
        """What the template prints."""
        packed = self.packed
        items = packed.block * CHUNK // packed.share
        values, preparation, statistics = self._factor(items)
        return {
            "planes": PLANES,
            "blocks": self.blocks,
            "block": packed.block,
            "chunks": self.chunks,
            "is_whole": self.chunks % packed.block == 0,
            "lanes": packed.lanes,
            "item_count": items,
            "shares": CHUNK // packed.share,
            "workgroup": self.workgroup,
            "pairs": CHUNK // SHARE,
            "totals": CHUNK // packed.group if packed.has_offsets else 0,
            "shares_of_total": max(1, packed.group // packed.share),
            "totals_of_share": max(1, packed.share // packed.group),
            "preparation": preparation,
            "vectors": values,
            "order": [[(e // VECTOR, "xyzw"[e % VECTOR]) for e in quad] for quad in self._order],
            "statistics": statistics,
            "row_sets": self.builder.index(self.rows // packed.rows_each),
            "products": self._products(),
        }

    @property
    def iterations(self) -> int:
        """The most that the loops of an invocation make."""
        items = self.packed.block * CHUNK // self.packed.share
        of_block = -(-items // self.workgroup) + -(-self.packed.block // self.packed.lanes) + 3
        return self.blocks * of_block

    @property
    def _order(self) -> tuple[Quad, Quad]:
        return self.packed.found.order

    # -- the factor ------------------------------------------------------------------------------

    def _factor(self, items: int) -> tuple[list[str], list[str], list[tuple[str, str]]]:
        """Vectors of the elements of an item, the statements before them, and its statistics.

        A statistic is the accumulator's name, and what it gets of the item.
        """
        at = iteration("at", items)
        start = (self.part * items + at) * self.packed.share
        lines: list[str] = []
        values: list[str] = []
        statistics: dict[str, list[str]] = {s: [] for s in self.packed.found.statistics}
        outer = Scope()
        for first in range(0, self.packed.share, SHARE):
            wide = Scope(parent=outer)
            for quad in range(first, first + SHARE, VECTOR):
                renderer = self._elements(start + quad, wide)
                values.append(renderer.render(self.packed.found.factor).widen(VECTOR))
                for output, terms in statistics.items():
                    terms.append(renderer.render(self.by_name[output].body).widen(VECTOR))
                lines += [*wide.lines, *renderer.scope.lines]
                wide.lines = []
        totals = []
        for output, terms in statistics.items():
            name = self.name(output)
            lines.append(f"let {name}_terms = {' + '.join(terms)};")
            totals.append((name, f"dot({name}_terms, vec4<f32>(1.0f))"))
        return values, lines, totals

    def _elements(self, first: Expr, wide: Scope) -> Renderer:
        """A renderer of four elements of any row; members are computed where they are read."""
        scope = Scope(parent=wide)
        row = self._row(0)
        lanes: Lanes = []
        for lane in range(VECTOR):
            elements = at_element(self.group.elements, self.element_symbols, first + lane)
            lanes.append({**row, **elements})
        renderer: Renderer

        def member(load: Load) -> Text | None:
            found: Member | None = self.by_name.get(load.buffer)
            if found is None:
                return None
            return self.rounding(load.buffer, renderer.render(found.body), renderer.let)

        renderer = self.builder.renderer(lanes, scope, member=member, wide=wide)
        return renderer

    # -- rows of weights -------------------------------------------------------------------------

    def _row(self, number: int) -> dict[Symbol, Expr]:
        """The values of the symbols of rows at one of those that an invocation takes."""
        each = self.packed.rows_each
        flat = iteration("row_set", self.rows // each) * each + number
        return flat_environment(self.row_symbols, flat, self.order)

    def _products(self) -> list[str]:
        """Statements that add a chunk's products to the accumulators, all loads first."""
        chunk = self.part * self.packed.block + iteration("c", self.packed.block)
        loads: list[str] = []
        scales: list[str] = []
        sums: list[str] = []
        rows = range(self.packed.rows_each)
        for found in self.packed.found.sums:
            renderers = [self._renderer(chunk * CHUNK, [row]) for row in rows]
            words = [
                [self._words(part, chunk, row, renderer) for part in found.levels.parts]
                for row, renderer in zip(rows, renderers, strict=True)
            ]
            for renderer in renderers:
                loads += _taken(renderer)
            groups, lines = self._groups(found, chunk)
            scales += lines
            for row, renderer in zip(rows, renderers, strict=True):
                sums += self._sum(found, row, words[row], groups[row], renderer)
        return [*loads, *scales, *sums]

    def _groups(self, found: PackedSum, chunk: Expr) -> tuple[list[list[_Group]], list[str]]:
        """Scales and offsets of a chunk by row and group, and the statements before them.

        Of four rows they are computed together: where a scale's neighbours are of other rows, one
        access has all of them.
        """
        rows = [*range(self.packed.rows_each)]
        together = [rows] if len(rows) == VECTOR else [[row] for row in rows]
        groups: list[list[_Group]] = [[] for _ in rows]
        lines: list[str] = []
        for number in range(CHUNK // found.group):
            for some in together:
                own = self._renderer(chunk * CHUNK + number * found.group, some)
                scale, offset = self._scale_and_offset(found, own)
                lines += _taken(own)
                for place, row in enumerate(some):
                    codes = ("" if t is None else t.lane(place) for t in (scale, offset))
                    groups[row].append(_Group(*codes))
        return groups, lines

    def _renderer(self, element: Expr, rows: Sequence[int]) -> Renderer:
        """What renders at one element of some of an invocation's rows."""
        elements = at_element(self.group.elements, self.element_symbols, element)
        return self.builder.renderer([{**self._row(row), **elements} for row in rows], Scope())

    def _words(self, part: LevelPart, chunk: Expr, row: int, renderer: Renderer) -> list[str]:
        """The words of a chunk as expressions, in loads as wide as they can be."""
        buffer, itemsize = part.load.buffer, part.load.dtype.itemsize
        number = dict.fromkeys(symbols_of(chunk_of(self.length)), chunk)
        address = substitute(part.address, {**self._row(row), **number})
        bindings = self.builder.bindings
        is_whole, of_access = itemsize == WORD_NBYTES, ACCESS_NBYTES // itemsize
        words: list[str] = []
        if part.words % VECTOR == 0 and is_multiple_of(address, of_access):
            function = bindings.function(buffer, "load4" if is_whole else "words")
            for k in range(part.words // VECTOR):
                code = f"{function}({self.builder.index(address // of_access + k)})"
                code = f"bitcast<vec4<u32>>({code})" if is_whole else code
                name = renderer.let(code, VECTOR, dtypes.uint32).code
                words += [f"{name}.{c}" for c in "xyzw"]
        else:
            function = bindings.function(buffer, "load" if is_whole else "word")
            for k in range(part.words):
                place = address // (WORD_NBYTES // itemsize) + k
                code = f"{function}({self.builder.index(place)})"
                code = f"bitcast<u32>({code})" if is_whole else code
                words.append(renderer.let(code, 1, dtypes.uint32).code)
        bindings.gather(part.load, False)
        return words

    def _scale_and_offset(
        self, found: PackedSum, renderer: Renderer
    ) -> tuple[Text | None, Text | None]:
        """The scale of a group, and what is added for each unit of the factor."""
        scale, offset = found.scale, found.offset
        if needs_sum(found):
            rest = float(center(found) - found.zero)
            if rest:
                own = const(rest, dtypes.float32) if scale is None else scale * rest
                offset = own if offset is None else offset + own
        scale_text = None if scale is None else renderer.render(scale)
        return scale_text, None if offset is None else renderer.render(offset)

    def _sum(
        self,
        found: PackedSum,
        row: int,
        words: Sequence[Sequence[str]],
        groups: Sequence[_Group],
        renderer: Renderer,
    ) -> list[str]:
        """Statements that add the products of a chunk of one row."""
        levels = [
            renderer.let(self._levels(found, quad, words, renderer), 1, dtypes.uint32).code
            for quad in quads_of(self._order)
        ]
        count = found.group // BYTES
        terms = []  # an infinite unit times the 0 of a group without infinity would be NaN
        for number, group in enumerate(groups):
            code = self._number(found, levels, range(number * count, (number + 1) * count))
            if group.scale:
                code = f"{code} * {group.scale}"
            if group.offset:
                code = f"{code} + {group.offset} * {self._total(found, number)}"
            terms.append(code)
        return [
            *_taken(renderer),
            f"{self.name(found.output, row)} += unit * ({' + '.join(terms)});",
        ]

    def _total(self, found: PackedSum, number: int) -> str:
        """The sum of the factor's integers in a group."""
        count = found.group // self.packed.group
        totals = [f"total{number * count + k}" for k in range(count)]
        return totals[0] if count == 1 else f"({' + '.join(totals)})"

    def _number(self, found: PackedSum, levels: Sequence[str], quads: range) -> str:
        """The products of levels with the factor's integers, as a float32."""
        planes = []
        for plane in range(PLANES):
            terms = [f"dot4I8Packed({levels[q]}, x{plane}_{q // 2}.{'xy'[q % 2]})" for q in quads]
            planes.append(" + ".join(terms))
        unit = 2.0 ** -_place(found)
        low = f"f32((({planes[-2]}) << 8u) + {planes[-1]}) * {literal_of(unit)}"
        if PLANES == 2:
            return f"({low})"
        return f"(f32({planes[0]}) * {literal_of(65536.0 * unit)} + {low})"

    def _levels(
        self, found: PackedSum, quad: Quad, words: Sequence[Sequence[str]], renderer: Renderer
    ) -> str:
        """Four levels as signed bytes: from the lowest bit on, or to the highest one."""
        terms = []
        for part, own in zip(found.levels.parts, words, strict=True):
            place, step = part.places[quad[0]], spacing(part, quad)
            assert step is not None, "packed_levels has checked it"
            word, bit = own[place // 32], place % 32
            if step != 8:
                start = bit - bit % step
                moved = f"({word} >> {start}u)" if start else word
                word = renderer.let(f"{_SPREAD[step]}({moved})", 1, dtypes.uint32).code
            shift = part.shift + _place(found)
            terms.append(_masked(word, shift - bit % step, part.width, shift))
        code = " | ".join(terms)
        return f"({code}) ^ {_SIGN_BITS}" if center(found) else code


def _place(found: PackedSum) -> int:
    """The bit of a byte where a level's lowest one is put: signed ones end with the highest."""
    levels = found.levels
    return 8 - levels.width if levels.signed or center(found) else 0


def _masked(word: str, left: int, width: int, shift: int) -> str:
    """Bits of each byte of a word, moved to the left (or right), and nothing else."""
    moved = f"({word} << {left}u)" if left > 0 else f"({word} >> {-left}u)" if left else word
    mask = (((1 << width) - 1) << shift) * 0x01010101
    return moved if mask == 0xFFFFFFFF else f"({moved} & {mask:#010x}u)"


def literal_of(value: float) -> str:
    """A float32 in WGSL."""
    return literal(const(value, dtypes.float32))


def _taken(renderer: Renderer) -> list[str]:
    """The statements of a renderer, which are printed by whoever takes them."""
    lines, renderer.scope.lines = renderer.scope.lines, []
    return lines
