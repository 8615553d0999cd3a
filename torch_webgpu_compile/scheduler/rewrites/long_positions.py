"""Positions of extremes among more elements than one workgroup should look through.

Parts of other reductions are reduced again in the same way (`split`). The position of an extreme is
looked for in each part, and then among the extremes of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import dtypes
from ...ir.access import flat_values
from ...ir.buffers import Buffer, intermediate
from ...ir.gathering import substitute_scalars
from ...ir.nodes import Pointwise, Reduction
from ...ir.scalar import Load, Scalar, apply, index, substitute_symbols
from ...ir.spaces import Node, numbered
from ...symbolic.sizes import Expr, as_expr, atom_expr, ceildiv, product
from ..mapping import point_of

POSITIONS = frozenset({"argmin", "argmax"})


def split_position(node: Reduction, parts: int, buffers: dict[str, Buffer]) -> list[Node]:
    """An ``argmin`` or ``argmax`` in ``parts``.

    Where a call decides how many elements there are, the last parts may have none.
    """
    count = product(node.reduce_ranges)
    chunk = ceildiv(count, parts)
    parts_size = ceildiv(count, chunk) if count.is_constant else as_expr(parts)
    (flat,) = numbered("position", (count,))
    body = substitute_symbols(node.body, flat_values("r", node.reduce_ranges, atom_expr(flat)))

    def element(row: Sequence[Expr], position: Scalar) -> Scalar:
        """The body; behind the last element that one again, which is not the first of equals."""
        rows = dict(zip(numbered("i", node.ranges), row, strict=True))
        return substitute_scalars(body, rows, {flat: apply("minimum", position, index(count - 1))})

    sizes = (parts_size, *node.ranges)
    in_part = _new(f"{node.output}_in_part", sizes, buffers)
    chosen = _new(f"{node.output}_part", node.ranges, buffers)
    part, *row = _points("i", sizes)
    (r,) = _points("r", (chunk,))
    inside = element(row, index(part * chunk + r))

    def position(part: Scalar, row: Sequence[Expr]) -> Scalar:
        start = apply("mul", part, index(chunk))
        found = Load(in_part, (part, *(index(i) for i in row)), dtypes.int64)
        return apply("add", start, found)

    here = _points("i", node.ranges)
    (p,) = _points("r", (parts_size,))
    best = element(here, position(index(p), here))
    winner = Load(chosen, tuple(index(i) for i in here), dtypes.int64)
    own = node.origins[-1:]
    return [
        Reduction(in_part, node.kind, sizes, (chunk,), inside, origins=node.origins),
        Reduction(chosen, node.kind, node.ranges, (parts_size,), best, origins=own),
        Pointwise(node.output, node.ranges, position(winner, here), origins=own),
    ]


def _points(prefix: str, sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    return point_of(numbered(prefix, sizes))


def _new(name: str, sizes: tuple[Expr, ...], buffers: dict[str, Buffer]) -> str:
    buffers[name] = intermediate(name, dtypes.int64, sizes)
    return name
