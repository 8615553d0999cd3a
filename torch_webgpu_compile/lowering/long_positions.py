"""Positions of extremes among more elements than one loop of a driver may have.

Other reductions are divided by the scheduler: their parts are reduced in the same way. The position
of an extreme is looked for in parts, and then among the extremes of the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..ir.access import neighbours_in_rows
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..ir.spaces import iteration_symbols, symbol_keys
from ..sizes import ONE, Expr, Symbol, as_expr, product
from .builder import Builder
from .value import IndexLike, Value, positions, substitute_scalars

# Elements per iteration: of the invocations that share a row, and of those that share a column.
_ROW_STEP, _COLUMN_STEP = 1024, 4
# Of the iterations, what one reduction may have in a kernel of several.
_SHARE = 8


def long_position(
    builder: Builder,
    kind: str,
    body: Scalar,
    sizes: Sequence[Expr],
    reduce_sizes: Sequence[Expr],
    name: str,
) -> Value:
    """`Builder.reduce` for ``argmin`` and ``argmax``, in parts where the driver asks for it."""
    count = product(reduce_sizes)
    most = _most(builder, body, sizes, reduce_sizes)
    if not (count.is_constant and int(count) > most > 0):
        return builder.reduce(kind, body, sizes, reduce_sizes, name=name)
    parts = as_expr(-(-int(count) // most))
    chunk = as_expr(-(-int(count) // int(parts)))
    last = const(int(count) - 1, dtypes.int64)

    def element(row: Sequence[Expr], position: Scalar) -> Scalar:
        """The body; behind the last element that one again, which is not the first of equals."""
        place = _coordinates(apply("minimum", position, last), reduce_sizes)
        return _at(body, (sizes, row), (reduce_sizes, place))

    part, *row = positions((parts, *sizes))
    (r,) = positions((chunk,), "r")
    inside = element(row, Index(part * chunk + r))
    found = builder.reduce(kind, inside, (parts, *sizes), (chunk,), name="in_part")

    def position(part: IndexLike, row: Sequence[Expr]) -> Scalar:
        number = Index(part) if isinstance(part, Expr) else part
        start = apply("mul", cast(number, dtypes.int64), Index(chunk))
        return apply("add", start, found.at([part, *row]))

    here = positions(sizes)
    (p,) = positions((parts,), "r")
    best = builder.reduce(kind, element(here, position(p, here)), sizes, (parts,), name="part")
    return builder.pointwise(position(best.body, here), sizes, name=name)


def _most(
    builder: Builder, body: Scalar, sizes: Sequence[Expr], reduce_sizes: Sequence[Expr]
) -> int:
    """Elements that one loop reaches in each row; 0 where loops have no limit."""
    rows = symbol_keys(iteration_symbols("i", sizes))
    elements = symbol_keys(iteration_symbols("r", reduce_sizes))
    fast = neighbours_in_rows([body], builder.buffers, rows, elements)
    step = _ROW_STEP if fast else _COLUMN_STEP
    return builder.target.max_loop_iterations // _SHARE * step


def _coordinates(number: Scalar, sizes: Sequence[Expr]) -> list[Scalar]:
    """The coordinates of a row-major position."""
    found = []
    for k, size in enumerate(sizes):
        step = product(sizes[k + 1 :])
        entry = number if step is ONE else apply("floor_divide", number, Index(step))
        found.append(entry if k == 0 else apply("remainder", entry, Index(size)))
    return found


def _at(
    body: Scalar,
    kept: tuple[Sequence[Expr], Sequence[Expr]],
    reduced: tuple[Sequence[Expr], Sequence[Scalar]],
) -> Scalar:
    """A reduction's body at a row and an element of it, each given as (sizes, coordinates)."""
    rows: dict[Symbol, Expr] = dict(
        zip(symbol_keys(iteration_symbols("i", kept[0])), kept[1], strict=True)
    )
    elements: dict[Symbol, Scalar] = dict(
        zip(symbol_keys(iteration_symbols("r", reduced[0])), reduced[1], strict=True)
    )
    return substitute_scalars(body, rows, elements)
