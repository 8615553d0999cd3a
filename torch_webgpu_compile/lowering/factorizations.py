"""Factorisations of matrices into triangular ones, and systems of these.

Source: ATen ``linalg_lu_factor_ex``, ``linalg_cholesky_ex``, ``linalg_solve_triangular``,
``triangular_solve``, ``cholesky_solve``, ``cholesky_inverse``, ``linalg_lu_solve``, ``lu_unpack``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import dtypes
from ..ir.nodes import Factorization, Scan, TriangularSolve, carry_name
from ..ir.scalar import Index, Local, Scalar, apply, cast, const, where
from ..symbolic.sizes import ZERO, Expr, as_expr, minimum
from ..torch_private import statically_known_true
from .builder import Builder, masked
from .joining import concatenated
from .matmul import matmul
from .registry import NotLowered, lowers
from .value import (
    Value,
    broadcast_index,
    expand,
    has_no_elements,
    permute,
    positions,
    slice_dim,
    zeros,
)

aten = torch.ops.aten
I32 = dtypes.int32

# Multiply-adds of the largest matrix that one workgroup factors by itself, and the most rows or
# columns. What is larger up to these is divided: each part has kernels of its own.
_ALONE, _LARGEST = Factorization.LARGEST**3, 1024
_CHECKS = "no kernel raises errors"
# Squares of rows per iteration of what solves them: 16 invocations or more share those below each.
_ROWS_SQUARED = 24


@lowers(aten.linalg_lu_factor_ex.default)
def lower_lu_factor(
    builder: Builder, A: Value, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Value, Value, Value]:
    """(L and U in one matrix, pivots from 1, info) with P · L · U = A; int32 pivots and info.

    Raises NotLowered: without pivots, to check errors, and for large matrices: more than 1024 rows
    or columns, on a CPU or of a symbolic number more than 240.
    """
    if check_errors or not pivot:
        raise NotLowered("LU without pivoting" if not pivot else _CHECKS)
    return _factored(builder, A, pivots=True)


@lowers(aten.linalg_cholesky_ex.default)
def lower_cholesky(
    builder: Builder, self: Value, *, upper: bool = False, check_errors: bool = False
) -> tuple[Value, Value]:
    """(L, info) with L · Lᵀ = self, of which the lower triangle is read; its mirror if ``upper``.

    Raises NotLowered: to check errors, and for matrices that are too large for LU factors.
    """
    if check_errors:
        raise NotLowered(_CHECKS)
    factor, _, info = _factored(builder, _transposed(self) if upper else self, pivots=False)
    return _transposed(factor) if upper else factor, info


def _factored(builder: Builder, matrix: Value, *, pivots: bool) -> tuple[Value, Value, Value]:
    """(factors, pivots, info) as `Factorization` says; ``pivots`` are empty if there are none."""
    *batch, rows, columns = matrix.sizes
    if has_no_elements(matrix.sizes):
        exchanges = zeros((*batch, minimum(rows, columns)), I32)
        return zeros(matrix.sizes, matrix.dtype), exchanges, zeros(batch, I32)
    if _is_left_to_one(builder, rows, columns):
        return _factored_by_one(builder, matrix, pivots)
    sizes = rows, columns
    # A CPU does not get faster by more kernels, which it compiles besides.
    largest = 0 if builder.target.software else _LARGEST
    if any(not size.is_constant or size.constant > largest for size in sizes):
        raise NotLowered(f"matrices of {rows} x {columns} elements")
    half = as_expr(min(size.constant for size in sizes) // 2)
    return (_lu_by_halves if pivots else _cholesky_by_halves)(builder, matrix, half)


def _lu_by_halves(builder: Builder, matrix: Value, half: Expr) -> tuple[Value, Value, Value]:
    """LU by halves: the first columns, then the rest of the rows below in the others.

    Source: Toledo, Locality of reference in LU decomposition with partial pivoting, 1997.
    """
    first, exchanges, info = _factored(builder, _columns(matrix, to=half), pivots=True)
    others = _exchanged(builder, _columns(matrix, half), exchanges, back=True)
    beside = _rows(others, to=half)
    beside = _solved(builder, first, beside, beside.sizes, upper=False, unit=True)
    below = _rows(first, half)
    rest = _less_product(builder, _rows(others, half), below, beside)
    second, later, later_info = _factored(builder, rest, pivots=True)
    below = _exchanged(builder, below, later, back=True)
    later = _mapped(builder, lambda k: k + const(half.constant, I32), later)
    factors = _in_quarters(builder, _rows(first, to=half), beside, below, second)
    info = _first_info(builder, info, later_info, half)
    return factors, _joined(builder, exchanges, later, -1), info


def _cholesky_by_halves(builder: Builder, matrix: Value, half: Expr) -> tuple[Value, Value, Value]:
    """Cholesky by halves: the first rows and columns, then the rest of the others."""
    upper, lower = _rows(matrix, to=half), _rows(matrix, half)
    first, none, info = _factored(builder, _columns(upper, to=half), pivots=False)
    above = _transposed(_columns(lower, to=half))
    above = _solved(builder, first, above, above.sizes, upper=False, unit=False)
    below = _transposed(above)
    rest = _less_product(builder, _columns(lower, half), below, above)
    second, _, later = _factored(builder, rest, pivots=False)
    factors = _in_quarters(builder, first, zeros(above.sizes, matrix.dtype), below, second)
    return factors, none, _first_info(builder, info, later, half)


def _less_product(builder: Builder, value: Value, lhs: Value, rhs: Value) -> Value:
    product = matmul(builder, lhs, rhs, value.dtype)
    return _mapped(builder, lambda a, b: a - b, value, product)


def _mapped(builder: Builder, function: Callable[..., Scalar], *values: Value) -> Value:
    """A function of the elements of values of equal sizes."""
    sizes = values[0].sizes
    return builder.pointwise(function(*(v.at(positions(sizes)) for v in values)), sizes)


def _first_info(builder: Builder, info: Value, later: Value, before: Expr) -> Value:
    """The first failure of two halves, where ``later`` was counted after so many rows."""

    def first(info: Scalar, later: Scalar) -> Scalar:
        moved = where(apply("eq", later, 0), 0, later + const(before.constant, I32))
        return where(apply("eq", info, 0), moved, info)

    return _mapped(builder, first, info, later)


def _in_quarters(builder: Builder, a: Value, b: Value, c: Value, d: Value) -> Value:
    """a beside b, above c beside d."""
    return _joined(builder, _joined(builder, a, b, -1), _joined(builder, c, d, -1), -2)


def _joined(builder: Builder, first: Value, second: Value, dim: int) -> Value:
    return concatenated(builder, [first, second], dim % first.rank, first.sizes, first.dtype)


def _rows(value: Value, start: Expr = ZERO, to: Expr | None = None) -> Value:
    return slice_dim(value, -2, start, (value.sizes[-2] if to is None else to) - start)


def _columns(value: Value, start: Expr = ZERO, to: Expr | None = None) -> Value:
    return slice_dim(value, -1, start, (value.sizes[-1] if to is None else to) - start)


def _factored_by_one(builder: Builder, matrix: Value, pivots: bool) -> tuple[Value, Value, Value]:
    """The results of a `Factorization`."""
    *batch, rows, columns = matrix.sizes
    output = builder.new_buffer(matrix.dtype, matrix.sizes)
    info = builder.new_buffer(I32, batch, f"{builder.hint}_info")
    exchanges = (*batch, minimum(rows, columns))
    exchanged = builder.new_buffer(I32, exchanges, f"{builder.hint}_pivots") if pivots else None
    outer = positions(batch, "b")
    (m,), (n,) = positions((rows,), "m"), positions((columns,), "n")
    body = builder.finished(matrix.at([*outer, m, n]))
    node = Factorization(
        output.name,
        info.name,
        None if exchanged is None else exchanged.name,
        tuple(batch),
        (rows, columns),
        body,
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    found = zeros((ZERO,), I32) if exchanged is None else builder.load(exchanged)
    return builder.load(output), found, builder.load(info)


def _is_left_to_one(builder: Builder, rows: Expr, columns: Expr) -> bool:
    """Whether one workgroup factors matrices of these sizes."""
    if rows.is_constant and columns.is_constant:
        small, large = sorted((rows.constant, columns.constant))
        return small * small * large <= _ALONE and large <= _LARGEST
    sizes = builder.arguments[0].shape[-2:]
    return all(statically_known_true(size <= Factorization.LARGEST) for size in sizes)


def _places(builder: Builder, pivots: Value, sizes: Sequence[Expr], *, back: bool) -> Value:
    """int32 ``sizes`` (…, rows): where each row is after rows 0, 1, … are exchanged in order with
    rows ``pivots`` (from 1).

    With ``back``: where the row that is there after the exchanges was before.
    """
    count = pivots.sizes[-1]
    *outer, row = positions(sizes)
    (time,) = positions((count,), "t")
    step = count - 1 - time if back else time
    other = pivots.at(broadcast_index(pivots, [*outer, step])) - 1
    here, place = cast(Index(step), I32), Local(carry_name(0), I32)
    moved = where(apply("eq", place, other), here, place)
    moved = where(apply("eq", place, here), other, moved)
    buffer = builder.new_buffer(I32, sizes, "places")
    node = Scan(
        carried=(buffer.name,),
        rows=(),
        ranges=tuple(sizes),
        length=count,
        finals=(0,),
        init=(cast(Index(row), I32),),
        step=(builder.finished(moved),),
        row=(),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    return builder.load(buffer)


@lowers(aten.lu_unpack.default)
def lower_lu_unpack(
    builder: Builder,
    LU_data: Value,
    LU_pivots: Value,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> tuple[Value, Value, Value]:
    """(P, L, U) with P · L · U the matrix; those that are not asked for are empty."""
    permutation, lower, upper = map(builder.zeros, range(3))
    if unpack_pivots and not permutation.is_empty:
        *index, row, column = positions(permutation.sizes)
        places = _places(builder, LU_pivots, permutation.sizes[:-1], back=False)
        hit = apply("eq", places.at([*index, row]), cast(Index(column), I32))
        body = cast(hit, permutation.dtype)
        permutation = builder.pointwise(body, permutation.sizes, name="P")
    if unpack_data and not lower.is_empty:
        *index, row, column = positions(lower.sizes)
        zero = const(0, lower.dtype)
        on_diagonal = apply("eq", Index(row), Index(column))
        below = Index(row) > Index(column)
        element = LU_data.at([*index, row, column])
        body = masked(below, element, where(on_diagonal, 1, zero))
        lower = builder.pointwise(body, lower.sizes, name="L")
    if unpack_data and not upper.is_empty:
        *index, row, column = positions(upper.sizes)
        inside = Index(row) <= Index(column)
        element = LU_data.at([*index, row, column])
        body = masked(inside, element, 0)
        upper = builder.pointwise(body, upper.sizes, name="U")
    return permutation, lower, upper


def _solved(
    builder: Builder, matrix: Value, rhs: Value, sizes: Sequence[Expr], upper: bool, unit: bool
) -> Value:
    """X of ``sizes`` [*, n, k] with matrix · X = rhs, whose batch dimensions broadcast.

    The matrix is lower triangular, or ``upper``; ``unit``: with ones on its diagonal. Raises
    NotLowered: where the driver bounds loops below what n rows take.
    """
    if has_no_elements(sizes):
        return zeros(sizes, rhs.dtype)
    *batch, rows, columns = sizes
    limit = builder.target.max_loop_iterations
    if limit and rows.is_constant and int(rows) ** 2 > _ROWS_SQUARED * limit:
        raise NotLowered(f"{rows} rows are more than this driver's loops may have iterations for")
    outer = positions(batch, "b")
    (m,), (k,), (n,) = (positions((s,), p) for s, p in ((rows, "m"), (rows, "k"), (columns, "n")))

    def at(value: Value, line: Expr, place: Expr) -> Scalar:
        return value.at(broadcast_index(value, [*outer, line, place]))

    def turned(line: Expr) -> Expr:
        return rows - 1 - line if upper else line  # the last row of an upper one is solved first

    whole = (*batch, rows, columns)
    buffer = builder.new_buffer(rhs.dtype, whole)
    node = TriangularSolve(
        buffer.name,
        tuple(batch),
        (rows, columns),
        unit,
        builder.finished(at(matrix, turned(m), turned(k))),
        builder.finished(at(rhs, turned(m), n)),
        origins=(builder.origin,),
    )
    builder.nodes.append(node)
    *index, row, column = positions(whole)
    return Value(rhs.dtype, whole, builder.load(buffer).at([*index, turned(row), column]))


def _transposed(value: Value) -> Value:
    return permute(value, [*range(value.rank - 2), value.rank - 1, value.rank - 2])


@lowers(aten.linalg_solve_triangular.default)
def lower_solve_triangular(
    builder: Builder,
    self: Value,
    B: Value,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Value:
    """X with self · X = B or, unless ``left``, with X · self = B, for a triangular matrix ``self``.

    Raises NotLowered: where the driver bounds loops below what that many rows take.
    """
    sizes = builder.out.sizes
    if left:
        return _solved(builder, self, B, sizes, upper, unitriangular)
    turned = (*sizes[:-2], sizes[-1], sizes[-2])
    matrix, rhs = _transposed(self), _transposed(B)
    return _transposed(_solved(builder, matrix, rhs, turned, not upper, unitriangular))


@lowers(aten.triangular_solve.default)
def lower_triangular_solve(
    builder: Builder,
    self: Value,
    A: Value,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Value, Value]:
    """(X with A · X = self for a triangular A or its transpose, A), both of all batches.

    Raises NotLowered: where the driver bounds loops below what that many rows take.
    """
    matrix = _transposed(A) if transpose else A
    upper = upper != transpose
    solution = _solved(builder, matrix, self, builder.out.sizes, upper, unitriangular)
    return solution, expand(A, builder.result(1).sizes)


@lowers(aten._cholesky_solve_helper.default, aten.cholesky_solve.default)
def lower_cholesky_solve(
    builder: Builder, self: Value, input2: Value, upper: bool = False
) -> Value:
    """X with L · Lᵀ · X = self, where ``input2`` is L or, if ``upper``, its transpose.

    Raises NotLowered: where the driver bounds loops below what that many rows take.
    """
    lower = _transposed(input2) if upper else input2
    return _cholesky_solved(builder, lower, self)


@lowers(aten.cholesky_inverse.default)
def lower_cholesky_inverse(builder: Builder, self: Value, upper: bool = False) -> Value:
    """The inverse of L · Lᵀ, where ``self`` is L or, if ``upper``, its transpose; […, n, n].

    Raises NotLowered: where the driver bounds loops below what n rows take.
    """
    sizes = builder.out.sizes
    *_, row, column = positions(sizes)
    one = cast(apply("eq", Index(row), Index(column)), self.dtype)
    lower = _transposed(self) if upper else self
    return _cholesky_solved(builder, lower, Value(self.dtype, sizes, one))


def _cholesky_solved(builder: Builder, lower: Value, rhs: Value) -> Value:
    sizes = builder.out.sizes
    half = _solved(builder, lower, rhs, sizes, upper=False, unit=False)
    return _solved(builder, _transposed(lower), half, sizes, upper=True, unit=False)


@lowers(aten.linalg_lu_solve.default)
def lower_lu_solve(
    builder: Builder,
    LU: Value,
    pivots: Value,
    B: Value,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Value:
    """X with A · X = B for A = P · L · U, with Aᵀ · X = B (``adjoint``), or from the right.

    Raises NotLowered: where the driver bounds loops below what that many rows take.
    """
    sizes = builder.out.sizes
    if has_no_elements(sizes):
        return zeros(sizes, B.dtype)
    if left:
        return _lu_solved(builder, LU, pivots, B, sizes, adjoint)
    turned = (*sizes[:-2], sizes[-1], sizes[-2])
    return _transposed(_lu_solved(builder, LU, pivots, _transposed(B), turned, not adjoint))


def _lu_solved(
    builder: Builder, packed: Value, pivots: Value, rhs: Value, sizes: Sequence[Expr], adjoint: bool
) -> Value:
    if adjoint:
        turned = _transposed(packed)
        half = _solved(builder, turned, rhs, sizes, upper=False, unit=False)
        found = _solved(builder, turned, half, sizes, upper=True, unit=True)
        return _exchanged(builder, found, pivots, back=False)
    moved = _exchanged(builder, expand(rhs, sizes), pivots, back=True)
    half = _solved(builder, packed, moved, sizes, upper=False, unit=True)
    return _solved(builder, packed, half, sizes, upper=True, unit=False)


def _exchanged(builder: Builder, value: Value, pivots: Value, *, back: bool) -> Value:
    """P · value, or with ``back`` Pᵀ · value, for the permutation P of the pivots."""
    sizes = value.sizes
    *index, row, column = positions(sizes)
    place = _places(builder, pivots, sizes[:-1], back=back).at([*index, row])
    body = value.at([*index, cast(place, dtypes.int64), column])
    return builder.pointwise(body, sizes, name="exchanged")
