"""Matrix products as contractions. Source: ATen ``mm``, ``bmm``, ``addmm``, ``mv``, ``dot``, ….

A product with a single row or column is a reduction (matrix–vector), and so is one of int64 or
bool, in which a contraction does not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.nodes import Contraction
from ..ir.scalar import Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, ZERO, Expr
from .activations import gelu, relu
from .builder import Builder, operand
from .pointwise import elementwise, plus, scaled, times
from .promotion import Operand, compute_dtype
from .registry import lowers
from .value import Value, positions, reshape

aten = torch.ops.aten


def is_contractible(dtype: DType) -> bool:
    """Whether `Contraction` accumulates as PyTorch does."""
    return dtype.is_float


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
    if total.dtype is dtype:
        return total
    return builder.pointwise(cast(total.body, dtype), total.sizes)


def matmul(builder: Builder, lhs: Value, rhs: Value, dtype: DType) -> Value:
    """lhs[…, m, k] · rhs[…, k, n] with equal leading dimensions, returned in ``dtype``."""
    *batch, m, k = lhs.sizes
    n = rhs.sizes[-1]
    sizes = (*batch, m, n)
    if any(size is ZERO for size in (*sizes, k)):
        return Value(dtype, sizes, const(0, dtype))
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
    total = builder.contract(wide, sizes, node)
    return total if wide is dtype else builder.pointwise(cast(total.body, dtype), sizes)


@lowers(aten.mm.default, aten.bmm.default, aten._int_mm.default)
def lower_mm(builder: Builder, self: Value, mat2: Value) -> Value:
    """[…, m, k] · […, k, n], in the dtype of the operands; int8 products of ``_int_mm`` are int32.

    16-bit floats are summed in float32 and rounded once. Products with a single row or column, and
    those of int64 or bool, are a `Reduction`, others a `Contraction`.
    """
    return matmul(builder, self, mat2, builder.out.dtype)


@lowers(aten.mm.dtype, aten.bmm.dtype)
def lower_mm_dtype(builder: Builder, self: Value, mat2: Value, out_dtype: torch.dtype) -> Value:
    """`lower_mm` with the result in ``out_dtype``, to which the float32 sum is rounded."""
    return matmul(builder, self, mat2, builder.out.dtype)


@lowers(aten.addmm.default, aten.baddbmm.default)
def lower_addmm(
    builder: Builder,
    self: Value,
    mat1: Value,
    mat2: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    """beta · self + alpha · (mat1 · mat2); beta = 0 ignores ``self``, NaN included."""
    product = matmul(builder, mat1, mat2, wide_dtype(builder.out.dtype))
    return add_scaled(builder, self, product, beta, alpha)


def wide_dtype(dtype: DType) -> DType:
    """The dtype of a product that more is added to.

    PyTorch rounds once, after the bias; the intermediate is therefore not rounded to 16 bits. It
    costs nothing once the addition is the contraction's epilogue.
    """
    return compute_dtype(dtype)


def add_scaled(
    builder: Builder, bias: Value, product: Value, beta: Operand, alpha: Operand
) -> Value:
    """beta · bias + alpha · product; a beta of 0 ignores the bias, NaN included."""
    if not isinstance(beta, Value) and beta == 0:
        return elementwise(builder, lambda p: scaled(p, alpha), product)

    def sum_of(bias: Scalar, product: Scalar) -> Scalar:
        term = scaled(bias, beta)
        if isinstance(beta, Value):  # a number that only a call knows
            is_zero = apply("eq", operand(beta, (), term.dtype), 0)
            term = where(is_zero, 0, term)
        return plus(term, scaled(product, alpha))

    return elementwise(builder, sum_of, bias, product, dtype=product.dtype)


@lowers(aten._addmm_activation.default)
def lower_addmm_activation(
    builder: Builder,
    self: Value,
    mat1: Value,
    mat2: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
    use_gelu: bool = False,
) -> Value:
    """relu (or tanh-gelu) of addmm."""
    total = lower_addmm(builder, self, mat1, mat2, beta=beta, alpha=alpha)
    function = partial(gelu, approximate="tanh") if use_gelu else relu
    return elementwise(builder, function, total)


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
def lower_addmv(
    builder: Builder,
    self: Value,
    mat: Value,
    vec: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    """``beta · self + alpha · (mat · vec)``; beta = 0 ignores ``self``, NaN included."""
    column = reshape(vec, [vec.sizes[0], ONE])
    product = matmul(builder, mat, column, wide_dtype(builder.out.dtype))
    return add_scaled(builder, self, reshape(product, builder.out.sizes), beta, alpha)
