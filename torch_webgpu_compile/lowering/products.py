"""Sums of products and distances other than plain matrix products. Source: ATen schemas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.scalar import Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE
from .builder import Builder
from .indexing import broadcast_sizes
from .matmul import add_scaled, matmul, wide_dtype
from .pointwise import times
from .promotion import Operand, compute_dtype
from .reductions import Reducing, converted, lower_vector_norm
from .registry import lowers
from .value import Value, broadcast_index, permute, positions, reshape, unsqueeze

aten = torch.ops.aten


@lowers(aten.addbmm.default)
def lower_addbmm(
    builder: Builder,
    self: Value,
    batch1: Value,
    batch2: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    """``beta · self + alpha · Σ batch1[b] · batch2[b]`` over the batches b, rounded once.

    [b, m, k] and [b, k, n] become one product of [m, b · k] and [b · k, n]; beta = 0 ignores
    ``self``.
    """
    batch, rows, inner = batch1.sizes
    columns = batch2.sizes[2]
    left = reshape(permute(batch1, [1, 0, 2]), [rows, batch * inner])
    right = reshape(batch2, [batch * inner, columns])
    total = matmul(builder, left, right, wide_dtype(builder.out.dtype))
    return add_scaled(builder, self, total, beta, alpha)


@lowers(aten.addr.default)
def lower_addr(
    builder: Builder,
    self: Value,
    vec1: Value,
    vec2: Value,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> Value:
    """beta · self + alpha · the outer product of two vectors, rounded once."""
    row, column = positions(builder.out.sizes)
    dtype = wide_dtype(builder.out.dtype)
    body = times(cast(vec1.at([row]), dtype), cast(vec2.at([column]), dtype))
    outer = Value(dtype, builder.out.sizes, body)
    return add_scaled(builder, self, outer, beta, alpha)


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


def _norm_terms(difference: Scalar, p: float) -> tuple[str, Scalar]:
    """How a p-norm reduces differences: the kind of reduction and its body."""
    magnitude = abs(difference)
    if p == 0:
        counted = cast(apply("ne", difference, 0), difference.dtype)
        return ("sum", where(apply("isnan", difference), difference, counted))
    if p == 1:
        return "sum", magnitude
    if p == 2:
        return "sum", apply("square", difference)
    if p == float("inf"):
        # PyTorch compares, which NaN never wins.
        return ("maximum", where(apply("isnan", difference), 0, magnitude))
    return ("sum", apply("pow", magnitude, p))


def _root(total: Scalar, p: float) -> Scalar:
    if p in (0, 1, float("inf")):
        return total
    return apply("sqrt", total) if p == 2 else apply("pow", total, 1 / p)


@lowers(aten._cdist_forward.default)
def lower_cdist(
    builder: Builder, x1: Value, x2: Value, p: float, compute_mode: int | None
) -> Value:
    """The p-norm distance of every row of x1 to every row of x2."""
    sizes = builder.out.sizes
    *batch, row, column = positions(sizes)
    depth = x1.sizes[-1]
    if x1.is_empty or x2.is_empty:
        return Value(x1.dtype, sizes, const(0, x1.dtype))
    (r,) = positions((depth,), "r")
    dtype = compute_dtype(x1.dtype)
    left = cast(x1.at(broadcast_index(x1, [*batch, row, r])), dtype)
    right = cast(x2.at(broadcast_index(x2, [*batch, column, r])), dtype)
    kind, body = _norm_terms(left - right, p)
    total = builder.reduce(kind, body, sizes, (depth,), name="terms")
    return builder.pointwise(cast(_root(total.body, p), x1.dtype), sizes)


@lowers(aten.dist.default)
def lower_dist(builder: Builder, self: Value, other: Value, p: float = 2) -> Value:
    """The p-norm of self − other."""
    dtype = compute_dtype(builder.out.dtype)
    index_sizes = broadcast_sizes([self.sizes, other.sizes])
    index = positions(index_sizes)
    left = cast(self.at(broadcast_index(self, index)), dtype)
    right = cast(other.at(broadcast_index(other, index)), dtype)
    difference = Value(dtype, index_sizes, left - right)
    return lower_vector_norm(builder, difference, p)
