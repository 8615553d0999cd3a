"""Parts of matrix factorisations. Source: ATen ``lu_unpack``."""

from __future__ import annotations

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const
from ..sizes import as_expr
from .builder import Builder, masked
from .registry import NotLowered, lowers
from .value import Value, positions

aten = torch.ops.aten
I32 = dtypes.int32

# Exchanges of rows that one kernel follows; each is two comparisons.
_EXCHANGES = 32


def _places(builder: Builder, pivots: Value, rows: Value) -> Value:
    """Where each row is after exchanging rows 0, 1, … with rows ``pivots`` (from 1), in order."""
    count = pivots.sizes[-1]
    *index, _ = positions(rows.sizes)
    if not count.is_constant:
        raise NotLowered(f"{count} pivots")
    for start in range(0, count.constant, _EXCHANGES):
        place: Scalar = rows.body
        for k in range(start, min(start + _EXCHANGES, count.constant)):
            other = apply("sub", pivots.at([*index, as_expr(k)]), const(1, I32))
            here = const(k, I32)
            left = apply("where", apply("eq", place, other), here, place)
            place = apply("where", apply("eq", place, here), other, left)
        rows = builder.pointwise(place, rows.sizes, name="places")
    return rows


@lowers(aten.lu_unpack.default)
def lower_lu_unpack(
    builder: Builder,
    LU_data: Value,
    LU_pivots: Value,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Value, Value, Value]:
    """(P, L, U) with P · L · U the matrix; those that are not asked for are empty."""
    empty = []
    for signature in builder.results:
        assert signature is not None
        zero = const(0, signature.dtype)
        empty.append(Value(signature.dtype, signature.sizes, zero))
    permutation, lower, upper = empty
    if unpack_pivots and not permutation.is_empty:
        *index, row, column = positions(permutation.sizes)
        numbers = positions(permutation.sizes[:-1])[-1]
        start = Value(I32, permutation.sizes[:-1], cast(Index(numbers), I32))
        places = _places(builder, LU_pivots, start)
        hit = apply("eq", places.at([*index, row]), cast(Index(column), I32))
        body = cast(hit, permutation.dtype)
        permutation = builder.pointwise(body, permutation.sizes, name="P")
    if unpack_data and not lower.is_empty:
        *index, row, column = positions(lower.sizes)
        one, zero = const(1, lower.dtype), const(0, lower.dtype)
        on_diagonal = apply("eq", Index(row), Index(column))
        below = apply("gt", Index(row), Index(column))
        element = LU_data.at([*index, row, column])
        body = masked(below, element, apply("where", on_diagonal, one, zero))
        lower = builder.pointwise(body, lower.sizes, name="L")
    if unpack_data and not upper.is_empty:
        *index, row, column = positions(upper.sizes)
        inside = apply("le", Index(row), Index(column))
        element = LU_data.at([*index, row, column])
        body = masked(inside, element, const(0, upper.dtype))
        upper = builder.pointwise(body, upper.sizes, name="U")
    return permutation, lower, upper
