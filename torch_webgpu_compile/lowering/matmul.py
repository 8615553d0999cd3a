"""Sums of products: matrix products as contractions, outer products, and distances.

Source: ATen ``mm``, ``bmm``, ``addmm``, ``mv``, ``dot``, ``addr``, ``cdist``, …. A matrix product
with a single row or column is a reduction (matrix–vector), and so is one of int64 or bool, in
which a contraction does not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.nodes import Contraction
from ..ir.scalar import Scalar, apply, cast, where
from ..symbolic.sizes import ONE, ZERO, Expr
from .builder import Builder, operand
from .pointwise import elementwise, plus, scaled, times
from .promotion import Operand, compute_dtype
from .reductions import Reducing, converted, norm_of_sum, norm_term
from .registry import lowers
from .value import (
    Value,
    broadcast_index,
    has_no_elements,
    permute,
    positions,
    reshape,
    unsqueeze,
    zeros,
)

aten = torch.ops.aten


def accumulator(dtype: DType) -> DType | None:
    """The dtype in which a `Contraction` sums up a product returned in ``dtype``, if it can.

    Narrow integers are summed up in 32 bits: what wraps in theirs is the same.
    """
    if dtype.is_float:
        return compute_dtype(dtype)
    is_narrow = dtype.kind is Kind.SIGNED and dtype.bits <= 32
    return dtypes.int32 if is_narrow or dtype is dtypes.uint8 else None


def product_sum(
    builder: Builder,
    out_sizes: Sequence[Expr],
    inner: Sequence[Expr],
    lhs: Scalar,
    rhs: Scalar,
    dtype: DType,
) -> Value:
    """Σ over r… of lhs · rhs (both over i… and r…) as a `Reduction`, returned in ``dtype``."""
    wide = compute_dtype(dtype)
    body = times(cast(lhs, wide), cast(rhs, wide))
    if dtype is dtypes.bool_:
        total = builder.reduce("any", body, out_sizes, inner)
    else:
        total = builder.reduce("sum", body, out_sizes, inner, name="wide" if wide != dtype else "")
    return converted(builder, total, dtype)


def matmul(builder: Builder, lhs: Value, rhs: Value, dtype: DType) -> Value:
    """lhs[…, m, k] · rhs[…, k, n] with equal leading dimensions, returned in ``dtype``."""
    *batch, m, k = lhs.sizes
    n = rhs.sizes[-1]
    sizes = (*batch, m, n)
    if has_no_elements((*sizes, k)):
        return zeros(sizes, dtype)
    wide = accumulator(dtype)
    if wide is None or m is ONE or n is ONE:
        index = positions(sizes)
        (r,) = positions((k,), "r")
        left = lhs.at([*index[:-1], r])
        right = rhs.at([*index[:-2], r, index[-1]])
        return product_sum(builder, sizes, (k,), left, right, dtype)
    kept = [size for size in batch if size is not ONE]
    symbols = iter(positions(kept, "b"))
    b = [ZERO if size is ONE else next(symbols) for size in batch]
    (row,), (column,), (inner,) = (positions((s,), p) for s, p in ((m, "m"), (n, "n"), (k, "k")))
    node = Contraction(
        output="",
        batch=tuple(kept),
        rows=(m,),
        columns=(n,),
        inner=(k,),
        lhs=cast(lhs.at([*b, row, inner]), wide),
        rhs=cast(rhs.at([*b, inner, column]), wide),
        index=(*b, row, column),
    )
    if dtype.is_float:
        return builder.contract(dtype, sizes, node)
    return converted(builder, builder.contract(wide, sizes, node), dtype)


@lowers(aten.mm.default, aten.bmm.default, aten.mm.dtype, aten.bmm.dtype)
def lower_mm(builder: Builder, self: Value, mat2: Value, *out_dtype: torch.dtype) -> Value:
    """[…, m, k] · […, k, n], in the dtype of the operands.

    16-bit floats are summed in float32 and rounded once (to ``out_dtype``, if that is given).
    Products with a single row or column, and those of int64 or bool, are a `Reduction`, others a
    `Contraction`.
    """
    return matmul(builder, self, mat2, builder.out.dtype)


@lowers(aten._int_mm.default)
def lower_int_mm(builder: Builder, self: Value, mat2: Value) -> Value:
    """[m, k] · [k, n] of int8, or of uint8 and int8, in int32.

    No instruction multiplies bytes of both kinds: u · v is (u - 128) · v + 128 · v, and the last
    term's sum does not depend on the row. Of weights, it is computed once.
    """
    if self.dtype is not dtypes.uint8 or mat2.dtype is not dtypes.int8:
        return matmul(builder, self, mat2, dtypes.int32)
    signed = cast(cast(self.at(positions(self.sizes)), dtypes.int32) - 128, dtypes.int8)
    product = matmul(builder, builder.pointwise(signed, self.sizes), mat2, dtypes.int32)
    (k,), (column,) = positions(mat2.sizes[:1], "r"), positions(mat2.sizes[1:])
    terms = cast(mat2.at([k, column]), dtypes.int32)
    columns = builder.reduce("sum", terms, mat2.sizes[1:], mat2.sizes[:1])
    return elementwise(builder, lambda p, s: p + s * 128, product, columns)


@lowers(aten.addmm.default, aten.baddbmm.default)
def lower_addmm(
    builder: Builder, self: Value, mat1: Value, mat2: Value, **scales: Operand
) -> Value:
    """beta · self + alpha · (mat1 · mat2); beta = 0 ignores ``self``, NaN included."""
    product = matmul(builder, mat1, mat2, compute_dtype(builder.out.dtype))
    return add_scaled(builder, self, product, **scales)


def add_scaled(
    builder: Builder, bias: Value, product: Value, *, beta: Operand = 1, alpha: Operand = 1
) -> Value:
    """beta · bias + alpha · product; a beta of 0 ignores the bias, NaN included.

    The product is in the compute dtype: PyTorch rounds once, after the bias.
    """
    if not isinstance(beta, Value) and beta == 0:
        return elementwise(builder, lambda p: scaled(p, alpha), product)

    def sum_of(bias: Scalar, product: Scalar) -> Scalar:
        term = scaled(bias, beta)
        if isinstance(beta, Value):  # a number that only a call knows
            is_zero = apply("eq", operand(beta, (), term.dtype), 0)
            term = where(is_zero, 0, term)
        return plus(term, scaled(product, alpha))

    return elementwise(builder, sum_of, bias, product, dtype=product.dtype)


@lowers(aten.mv.default)
def lower_mv(builder: Builder, self: Value, vec: Value) -> Value:
    """[m, k] · [k]: a vector of m elements."""
    column = reshape(vec, [vec.sizes[0], ONE])
    return reshape(matmul(builder, self, column, builder.out.dtype), builder.out.sizes)


@lowers(aten.dot.default, aten.vdot.default)
def lower_dot(builder: Builder, self: Value, tensor: Value) -> Value:
    """Σ of the products of two vectors' elements; of no elements 0."""
    (size,) = self.sizes
    row, column = reshape(self, [ONE, size]), reshape(tensor, [size, ONE])
    return reshape(matmul(builder, row, column, builder.out.dtype), ())


@lowers(aten.addmv.default)
def lower_addmv(builder: Builder, self: Value, mat: Value, vec: Value, **scales: Operand) -> Value:
    """``beta · self + alpha · (mat · vec)``; beta = 0 ignores ``self``, NaN included."""
    column = reshape(vec, [vec.sizes[0], ONE])
    product = matmul(builder, mat, column, compute_dtype(builder.out.dtype))
    return add_scaled(builder, self, reshape(product, builder.out.sizes), **scales)


@lowers(aten.addbmm.default)
def lower_addbmm(
    builder: Builder, self: Value, batch1: Value, batch2: Value, **scales: Operand
) -> Value:
    """``beta · self + alpha · Σ batch1[b] · batch2[b]`` over the batches b, rounded once.

    [b, m, k] and [b, k, n] become one product of [m, b · k] and [b · k, n]; beta = 0 ignores
    ``self``.
    """
    batch, rows, inner = batch1.sizes
    columns = batch2.sizes[2]
    left = reshape(permute(batch1, [1, 0, 2]), [rows, batch * inner])
    right = reshape(batch2, [batch * inner, columns])
    total = matmul(builder, left, right, compute_dtype(builder.out.dtype))
    return add_scaled(builder, self, total, **scales)


@lowers(aten.addr.default)
def lower_addr(builder: Builder, self: Value, vec1: Value, vec2: Value, **scales: Operand) -> Value:
    """beta · self + alpha · the outer product of two vectors, rounded once."""
    row, column = positions(builder.out.sizes)
    dtype = compute_dtype(builder.out.dtype)
    body = times(cast(vec1.at([row]), dtype), cast(vec2.at([column]), dtype))
    return add_scaled(builder, self, Value(dtype, builder.out.sizes, body), **scales)


@lowers(aten._trilinear.default)
def lower_trilinear(
    builder: Builder,
    i1: Value,
    i2: Value,
    i3: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """Σ over ``sumdim`` of the product of three tensors with dimensions inserted."""
    values = []
    for value, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for dim in sorted(dims):
            value = unsqueeze(value, dim)
        values.append(value)
    sizes = []
    for k in range(values[0].rank):
        sizes.append(next((v.sizes[k] for v in values if v.sizes[k] is not ONE), ONE))
    dtype = compute_dtype(builder.out.dtype)
    index = positions(sizes)
    body: Scalar | None = None
    for value in values:
        factor = cast(value.at(broadcast_index(value, index)), dtype)
        body = factor if body is None else times(body, factor)
    assert body is not None
    split = Reducing(Value(dtype, tuple(sizes), body), sorted(sumdim))
    return converted(builder, split.reduce(builder, "sum", split.body(), keepdim=False))


def _norm_terms(difference: Scalar, p: Operand) -> tuple[str, Scalar]:
    """How a p-norm reduces differences: the kind of reduction and its body."""
    if p == float("inf"):
        # PyTorch compares, which NaN never wins.
        return ("maximum", where(apply("isnan", difference), 0, abs(difference)))
    term = norm_term(difference, p)
    if p == 0:
        term = where(apply("isnan", difference), difference, term)
    return "sum", term


@lowers(aten._cdist_forward.default)
def lower_cdist(
    builder: Builder, x1: Value, x2: Value, p: Operand, compute_mode: int | None
) -> Value:
    """The p-norm distance of every row of x1 to every row of x2."""
    sizes = builder.out.sizes
    *batch, row, column = positions(sizes)
    depth = x1.sizes[-1]
    if x1.is_empty or x2.is_empty:
        return zeros(sizes, x1.dtype)
    (r,) = positions((depth,), "r")
    dtype = compute_dtype(x1.dtype)
    left = cast(x1.at(broadcast_index(x1, [*batch, row, r])), dtype)
    right = cast(x2.at(broadcast_index(x2, [*batch, column, r])), dtype)
    kind, body = _norm_terms(left - right, p)
    total = builder.reduce(kind, body, sizes, (depth,), name="terms")
    norm = total.body if kind == "maximum" else norm_of_sum(total.body, p)
    return builder.pointwise(cast(norm, x1.dtype), sizes)
