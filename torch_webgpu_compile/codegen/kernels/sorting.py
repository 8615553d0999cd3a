"""Sorting: rows in the memory of a workgroup, and long rows by one digit after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.buffers import Buffer
from ...ir.nodes import outputs_of
from ...ir.scalar import Scalar, scalar_symbols, walk
from ...ir.sorting_nodes import (
    BINS,
    DIGIT_BITS,
    TILES,
    DigitCounts,
    DigitScatter,
    PartSums,
    RowSort,
    sums_nbytes,
)
from ...ir.spaces import numbered
from ...plan.model import KernelCall
from ...symbolic.sizes import (
    Expr,
    Symbol,
    as_expr,
    ceildiv,
    delinearize,
    floordiv,
    iteration,
    product,
    value_range,
)
from ...target import Target
from ..values import Scope
from .builder import KernelBuilder

WORKGROUP = 256
_KEY_BITS, _STEP_BITS = 16, 4  # of a key in an item, and of what it is ordered by at a time
# Loads do not wait for each other: so many elements at once, whose expressions have so many nodes.
_MOST_TOGETHER, _MOST_NODES = 8, 400


@dataclass(frozen=True, slots=True)
class Sums:
    """Inputs of the template ``workgroup_sums``: groups of ``lanes`` invocations."""

    lanes: int = WORKGROUP
    workgroup: int = WORKGROUP

    @property
    def groups(self) -> int:
        """Groups in a workgroup."""
        return self.workgroup // self.lanes

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """(distance, start of the half that is read, of that which is written)"""
        distances = [d for d in (1, 4, 16, 64, 256) if d < self.lanes]
        starts = 0, self.workgroup
        return [(d, starts[k % 2], starts[1 - k % 2]) for k, d in enumerate(distances)]

    @property
    def nbytes(self) -> int:
        """Bytes of workgroup memory."""
        return sums_nbytes(self.workgroup, self.groups)


class RowRenderer:
    """Renders the scalars of a node over elements of a row, for a workgroup with one row."""

    def __init__(self, builder: KernelBuilder, ranges: Sequence[Expr], length: Expr) -> None:
        self.builder = builder
        self.length = length
        self.lead = delinearize(iteration("row", product(ranges)), ranges)
        self.rows = dict(zip(numbered("i", ranges), self.lead, strict=True))
        (self.element,) = numbered("j", (length,))
        self.outside = Scope()
        self.outer = builder.renderer([self.rows], self.outside)

    def at(self, names: Sequence[str], bodies: Sequence[Scalar]) -> tuple[list[str], list[str]]:
        """(statements, the values) of bodies at the elements that variables name.

        What is the same in all of the row is computed `outside`.
        """
        lines, values = [], []
        for name in names:
            scope = Scope(parent=self.outside)
            place = {**self.rows, self.element: iteration(name, self.length)}
            renderer = self.builder.renderer(
                [place], scope, outer=self.outer, belongs_outside=self._is_outside
            )
            values += [renderer.render(body).code for body in bodies]
            lines += scope.lines
        return lines, values

    def _is_outside(self, node: Scalar) -> bool:
        return self.element not in scalar_symbols(node)

    def address(self, name: str, *index: Expr) -> str:
        """The address of an element of a buffer in the row."""
        return self.builder.address(name, [*self.lead, *index])

    def load(self, name: str, *index: Expr) -> str:
        """The element of a buffer that a kernel takes whole."""
        return self.builder.load_element(name, [*self.lead, *index])

    def store(self, name: str, value: str, *index: Expr) -> str:
        """The statement that stores an element."""
        return self.builder.store_element(name, [*self.lead, *index], value)


def taken_together(body: Scalar) -> int:
    """How many elements an invocation takes at once."""
    nodes = sum(1 for _ in walk(body))
    return max(1, min(_MOST_TOGETHER, _MOST_NODES // nodes))


def _is_short(bits: int) -> bool:
    """Whether the last digit of so many bits has no second half."""
    return 0 < bits % DIGIT_BITS <= DIGIT_BITS // 2


def generate_row_sort(node: RowSort, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    tile = TILES[node.tile]
    rows, shortest = product(node.ranges), max(1, value_range(node.length).start)
    taken = floordiv(as_expr(tile.size), node.length)
    # Others do not leave most invocations idle, and the number of their steps is part of the code.
    several = tile.share == 1 and 2 * shortest <= tile.size
    lead = delinearize(iteration("row", rows), node.ranges)
    (element,) = numbered("j", (node.length,))
    at: dict[Symbol, Expr] = {
        **dict(zip(numbered("i", node.ranges), lead, strict=True)),
        element: iteration("place", node.length),
    }
    words, steps, turns = [], 0, 0
    for body, bits in zip(node.words, node.bits, strict=True):
        end = steps + -(-bits // _STEP_BITS)
        words.append({"first": steps, "end": end, "key": builder.compute(body, [at])})
        turns |= sum(1 << step for step in range(steps, end, _KEY_BITS // _STEP_BITS))
        steps = end
    most_rows = tile.size // shortest
    row_steps = -(-(most_rows - 1).bit_length() // _STEP_BITS) if several else 0
    scope = Scope()
    payloads = [builder.renderer([at], scope).render(body).code for body in node.payloads]
    place = [*lead, iteration("number", node.count)]
    return builder.finish(
        "row_sort",
        {
            "tile": tile,
            "sums": Sums(tile.workgroup, tile.workgroup),
            "rows": builder.index(rows),
            "length": builder.index(node.length),
            "count": builder.index(node.count),
            "taken": builder.index(taken) if several else 1,
            "several": several,
            "words": words,
            "steps": steps,
            "row_steps": row_steps,
            "turns": turns | 1 << steps | 1 << steps + row_steps,
            "payloads": scope.lines,
            "stores": [
                builder.store_element(name, place, code)
                for name, code in zip(outputs_of(node), payloads, strict=True)
            ],
        },
        workgroup_size=tile.workgroup,
        workgroups=ceildiv(rows, taken) if several else rows,
        origins=node.origins,
        flops=rows * node.length * steps,
        workgroup_nbytes=tile.nbytes,
        iterations=as_expr((steps + row_steps + 1) * (tile.share + 4)),
    )


def generate_digit_scatter(
    node: DigitScatter, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    tile = TILES[node.tile]
    rows = RowRenderer(builder, node.ranges, node.length)
    parts = ceildiv(node.length, node.tile)
    total = product(node.ranges) * parts
    digit, (value,) = rows.at(["place"], [node.digit])
    payloads, moved = rows.at(["place"], node.payloads)
    bin, part = iteration("bin", BINS), iteration("part", parts)
    target_place = iteration("target_place", node.length)
    return builder.finish(
        "digit_scatter",
        {
            "tile": tile,
            "sums": Sums(),
            "total": builder.index(total),
            "parts": builder.index(parts),
            "length": builder.index(node.length),
            "halves": 1 if _is_short(node.bits) else 2,
            "outside": rows.outside.lines,
            "digit": {"lines": digit, "value": value},
            "totals": rows.load(node.totals, bin),
            "before": rows.load(node.before, part, bin),
            "payloads": payloads,
            "stores": [
                rows.store(name, code, target_place)
                for name, code in zip(outputs_of(node), moved, strict=True)
            ],
        },
        workgroup_size=WORKGROUP,
        workgroups=total,
        origins=node.origins,
        flops=product(node.ranges) * node.length,
        workgroup_nbytes=tile.nbytes + BINS * 4,
        iterations=as_expr(3 * (tile.share + 1)),
    )


def generate_digit_counts(
    node: DigitCounts, buffers: dict[str, Buffer], target: Target
) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    rows = RowRenderer(builder, node.ranges, node.length)
    total = product(node.ranges) * node.parts
    together = taken_together(node.digit)
    names = [f"place{k}" for k in range(together)]
    digits, values = rows.at(names, [node.digit])
    bin, part = iteration("bin", node.bins), iteration("part", node.parts)
    return builder.finish(
        "digit_counts",
        {
            "total": builder.index(total),
            "parts": builder.index(node.parts),
            "part_length": builder.index(node.part),
            "length": builder.index(node.length),
            "bins": node.bins,
            "outside": rows.outside.lines,
            "names": names,
            "digits": digits,
            "values": values,
            "store": rows.store(node.output, "counted", part, bin),
        },
        workgroup_size=WORKGROUP,
        workgroups=total,
        origins=node.origins,
        flops=product(node.ranges) * node.length,
        workgroup_nbytes=node.bins * 4,
        iterations=ceildiv(node.part, WORKGROUP * together) + 1,
    )


def generate_part_sums(node: PartSums, buffers: dict[str, Buffer], target: Target) -> KernelCall:
    """The kernel of one node."""
    builder = KernelBuilder(target, buffers)
    rows = RowRenderer(builder, node.ranges, node.parts)
    sums = Sums(node.lanes)
    shares = BINS // sums.groups
    total = product(node.ranges) * shares
    bin, part = iteration("bin", BINS), iteration("part", node.parts)
    return builder.finish(
        "part_sums",
        {
            "sums": sums,
            "total": builder.index(total),
            "shares": shares,
            "parts": builder.index(node.parts),
            "count": rows.load(node.counts, part, bin),
            "store": rows.store(node.before, "before", part, bin),
            "store_total": rows.store(node.totals, "carried", bin),
        },
        workgroup_size=WORKGROUP,
        workgroups=total,
        origins=node.origins,
        flops=product(node.extents),
        workgroup_nbytes=sums.nbytes,
        iterations=ceildiv(node.parts, node.lanes) + 1,
    )
