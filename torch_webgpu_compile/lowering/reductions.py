"""Reductions over dimensions. Source: ATen schemas of the same names.

16-bit floats reduce in float32, bool and narrow integers sum in int64. A result with keepdim is a
view of the one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import ONE, Expr, product
from .builder import Builder, operand
from .promotion import Operand, compute_dtype
from .registry import lowers
from .value import Value, broadcast_index, positions, reshape, zeros

aten = torch.ops.aten
Dims = Sequence[int] | int | None


def dims_of(value: Value, dim: Dims) -> list[int]:
    """Non-negative reduced dimensions, in order; all for None or none given."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return list(range(value.rank))
    given = [dim] if isinstance(dim, int) else dim
    return sorted({d % max(value.rank, 1) for d in given}) if value.rank else []


class Reducing:
    """A value split into kept and reduced dimensions."""

    def __init__(self, value: Value, dims: Sequence[int]) -> None:
        self.value = value
        self.dims = list(dims)
        self.kept = [k for k in range(value.rank) if k not in self.dims]
        self.sizes = tuple(value.sizes[k] for k in self.kept)
        self.reduce_sizes = tuple(value.sizes[k] for k in self.dims)

    @property
    def count(self) -> Expr:
        """Elements that each result reduces."""
        return product(self.reduce_sizes)

    @property
    def keepdim_sizes(self) -> tuple[Expr, ...]:
        """The value's sizes with 1 in every reduced dimension."""
        return tuple(ONE if k in self.dims else s for k, s in enumerate(self.value.sizes))

    def index(self) -> list[Expr]:
        """The index into the value: i symbols in kept dimensions, r symbols in reduced ones."""
        entries: dict[int, Expr] = dict(zip(self.kept, positions(self.sizes), strict=True))
        reduced = positions(self.reduce_sizes, "r")
        entries.update(zip(self.dims, reduced, strict=True))
        return [entries[k] for k in range(self.value.rank)]

    def body(self, value: Value | None = None) -> Scalar:
        """An element of the value, or of another of the same sizes up to broadcasting."""
        other = self.value if value is None else value
        if other.is_empty:
            return const(0, other.dtype)
        return other.at(broadcast_index(other, self.index()))

    def reduce(
        self, builder: Builder, kind: str, body: Scalar, *, keepdim: bool, name: str = ""
    ) -> Value:
        """The reduction of ``body``; with ``keepdim`` it broadcasts against the value."""
        result = builder.reduce(kind, body, self.sizes, self.reduce_sizes, name=name)
        return reshape(result, self.keepdim_sizes) if keepdim else result


def _reduce(
    builder: Builder, kind: str, value: Value, dim: Dims, keepdim: bool, dtype: DType
) -> Value:
    """One reduction in ``dtype``, then a conversion to the result's dtype."""
    if dtype is dtypes.bool_:  # of a sum or product, which PyTorch computes in bool if told so
        kind = {"sum": "any", "prod": "all"}.get(kind, kind)
    split = Reducing(value, dims_of(value, dim))
    body = cast(split.body(), dtype)
    if not split.dims:
        return builder.pointwise(cast(body, builder.out.dtype), value.sizes)
    name = "" if dtype is builder.out.dtype else "wide"
    return converted(builder, split.reduce(builder, kind, body, keepdim=keepdim, name=name))


def converted(builder: Builder, value: Value, dtype: DType | None = None) -> Value:
    """``value`` in the result's dtype."""
    dtype = dtype or builder.out.dtype
    if value.dtype is dtype:
        return value
    return builder.pointwise(cast(value.body, dtype), value.sizes)


@lowers(aten.sum.dim_IntList, aten.sum.default)
def lower_sum(
    builder: Builder, self: Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """Σ over ``dim`` (all dimensions for None or none given), of no elements 0.

    16-bit floats are summed in float32 and rounded once; integers wrap; bools as a result are
    or-ed.
    """
    return _reduce(builder, "sum", self, dim, keepdim, compute_dtype(builder.out.dtype))


@lowers(aten.prod.dim_int, aten.prod.default)
def lower_prod(
    builder: Builder, self: Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """The product over ``dim`` (all dimensions for None), of no elements 1.

    16-bit floats are multiplied in float32 and rounded once; integers wrap; bools as a result are
    and-ed.
    """
    return _reduce(builder, "prod", self, dim, keepdim, compute_dtype(builder.out.dtype))


@lowers(aten.mean.dim, aten.mean.default)
def lower_mean(
    builder: Builder, self: Value, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """Σ / count over ``dim`` (all dimensions for None or none given), of no elements NaN.

    16-bit floats are summed in float32 and rounded once, after the division.
    """
    split = Reducing(self, dims_of(self, dim))
    mean = mean_of(builder, split, compute_dtype(builder.out.dtype), keepdim=keepdim)
    return builder.pointwise(cast(mean, builder.out.dtype), builder.out.sizes)


def mean_of(builder: Builder, split: Reducing, dtype: DType, *, keepdim: bool) -> Scalar:
    """Sum over count, as a body over the reduced sizes; the sum is a node."""
    total = split.reduce(builder, "sum", cast(split.body(), dtype), keepdim=keepdim, name="sum")
    return total.body / count_scalar(split.count, dtype)


def count_scalar(count: Expr, dtype: DType) -> Scalar:
    """A size as a number."""
    return const(count.constant, dtype) if count.is_constant else cast(Index(count), dtype)


@lowers(aten.amax.default, aten.max.default)
def lower_amax(builder: Builder, self: Value, dim: Dims = (), keepdim: bool = False) -> Value:
    """The largest element over ``dim`` (all for none), NaN if there is one; of bools, any."""
    return _extreme(builder, "maximum", self, dim, keepdim)


@lowers(aten.amin.default, aten.min.default)
def lower_amin(builder: Builder, self: Value, dim: Dims = (), keepdim: bool = False) -> Value:
    """The smallest element over ``dim`` (all for none), NaN if there is one; of bools, all."""
    return _extreme(builder, "minimum", self, dim, keepdim)


def _extreme(builder: Builder, kind: str, value: Value, dim: Dims, keepdim: bool) -> Value:
    if value.dtype is dtypes.bool_:
        kind = "any" if kind == "maximum" else "all"
    # min and max are exact in any dtype: 16-bit floats widen only for the kernel's sake
    return _reduce(builder, kind, value, dim, keepdim, compute_dtype(value.dtype))


def extreme_along(
    builder: Builder, value: Value, dim: int, largest: bool, keepdim: bool = True
) -> tuple[Value | None, Value | None]:
    """(the extreme elements along ``dim``, their int64 positions); only what is read is made.

    NaN is the extreme if there is one; of equal elements, the position is the first.
    """
    values = indices = None
    if builder.is_used(0):
        values = _extreme(builder, "maximum" if largest else "minimum", value, dim, keepdim)
    if builder.is_used(1):
        indices = _position(builder, "argmax" if largest else "argmin", value, dim, keepdim)
    return values, indices


@lowers(aten.max.dim)
def lower_max_dim(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value | None, Value | None]:
    """The largest elements; see `extreme_along`."""
    return extreme_along(builder, self, dim, True, keepdim)


@lowers(aten.min.dim)
def lower_min_dim(
    builder: Builder, self: Value, dim: int, keepdim: bool = False
) -> tuple[Value | None, Value | None]:
    """The smallest elements; see `extreme_along`."""
    return extreme_along(builder, self, dim, False, keepdim)


def _position(builder: Builder, kind: str, value: Value, dim: Dims, keepdim: bool) -> Value:
    if value.dtype is dtypes.bool_:
        value = value.cast(dtypes.int32)
    split = Reducing(value, dims_of(value, dim))
    if not split.dims:
        return zeros(value.sizes, dtypes.int64)
    body = cast(split.body(), compute_dtype(value.dtype))
    return split.reduce(builder, kind, body, keepdim=keepdim, name="index")


def _register_position(name: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(
        builder: Builder, self: Value, dim: int | None = None, keepdim: bool = False
    ) -> Value:
        """The int64 position of the extreme along ``dim``, or (None) in row-major order."""
        return _position(builder, name, self, dim, keepdim)


_register_position("argmax")
_register_position("argmin")


def _register_test(name: str) -> None:
    packet = getattr(aten, name)

    @lowers(packet.default, packet.dim, packet.dims)
    def lower(builder: Builder, self: Value, dim: Dims = None, keepdim: bool = False) -> Value:
        """Whether any (or all) elements over ``dim`` are nonzero.

        Computed in bool and converted to the dtype of the result: that is uint8 for uint8, else
        bool.
        """
        return _reduce(builder, name, self, dim, keepdim, dtypes.bool_)


_register_test("any")
_register_test("all")


def squared_deviations(
    builder: Builder, split: Reducing, mean: Value, dtype: DType, *, keepdim: bool
) -> Value:
    """Σ (x − mean)² with a mean that broadcasts against the value."""
    difference = cast(split.body(), dtype) - cast(split.body(mean), dtype)
    body = apply("square", difference)
    return split.reduce(builder, "sum", body, keepdim=keepdim, name="deviations")


def variance(
    builder: Builder, split: Reducing, correction: Operand, dtype: DType, *, keepdim: bool
) -> tuple[Value, Value]:
    """(variance, mean) in ``dtype``, in two passes; the mean keeps reduced dimensions."""
    mean = builder.pointwise(
        mean_of(builder, split, dtype, keepdim=True), split.keepdim_sizes, name="mean"
    )
    deviations = squared_deviations(builder, split, mean, dtype, keepdim=keepdim)
    # Σ / 0 spelt out: kernels of one element are folded by compilers that assume no NaN.
    limits = (const(float("inf"), dtype), const(float("nan"), dtype))
    of_none = apply("where", deviations.body > 0, *limits)
    count = count_scalar(split.count, dtype) - operand(correction, (), dtype)
    if isinstance(correction, (Value, Expr)):
        body = where(count > 0, deviations.body / count, of_none)
    elif split.count.is_constant and split.count.constant <= correction:
        body = of_none
    else:
        body = deviations.body / apply("maximum", count, 0)
    return builder.pointwise(body, deviations.sizes, name="var"), mean


def _variance_over(
    builder: Builder,
    value: Value,
    dim: Dims = None,
    *,
    correction: Operand | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    """(variance, mean) over dimensions, both in the dtype of the computation."""
    split = Reducing(value, dims_of(value, dim))
    correction = 1 if correction is None else correction
    dtype = compute_dtype(value.dtype)
    result, mean = variance(builder, split, correction, dtype, keepdim=keepdim)
    return result, mean if keepdim else reshape(mean, split.sizes)


@lowers(aten.var.correction)
def lower_var(builder: Builder, self: Value, *dim: Dims, **options: Any) -> Value:
    """Σ (x − mean)² / (count − correction) over ``dim`` (all for None), in two passes.

    The correction is 1 unless given. Where it is not below the count, the result is NaN, or ∞ if
    there are deviations.
    """
    result, _ = _variance_over(builder, self, *dim, **options)
    return converted(builder, result)


@lowers(aten.std.correction)
def lower_std(builder: Builder, self: Value, *dim: Dims, **options: Any) -> Value:
    """The square root of `lower_var`, taken before rounding to the result's dtype."""
    result, _ = _variance_over(builder, self, *dim, **options)
    return builder.pointwise(cast(apply("sqrt", result.body), self.dtype), result.sizes)


@lowers(aten.var_mean.correction)
def lower_var_mean(
    builder: Builder, self: Value, *dim: Dims, **options: Any
) -> tuple[Value, Value]:
    """(the variance as in `lower_var`, the mean)."""
    result, mean = _variance_over(builder, self, *dim, **options)
    return converted(builder, result), converted(builder, mean)


@lowers(aten.logsumexp.default)
def lower_logsumexp(builder: Builder, self: Value, dim: Dims, keepdim: bool = False) -> Value:
    """``log Σ exp(x)`` over ``dim``, as ``max + log Σ exp(x − max)``.

    An infinite maximum is not subtracted, so that ∞ gives ∞ and not NaN.
    """
    split = Reducing(self, dims_of(self, dim))
    dtype = compute_dtype(builder.out.dtype)
    largest = split.reduce(builder, "maximum", cast(split.body(), dtype), keepdim=True, name="max")
    infinite = apply("isinf", largest.body)
    finite = where(infinite, 0, largest.body)
    shift = builder.pointwise(finite, largest.sizes, name="shift")
    grown = apply("fast_exp", cast(split.body(), dtype) - split.body(shift))
    total = split.reduce(builder, "sum", grown, keepdim=keepdim, name="sum")
    shift = shift if keepdim else reshape(shift, split.sizes)
    body = shift.body + apply("log", total.body)
    return builder.pointwise(cast(body, builder.out.dtype), total.sizes)


@lowers(aten.linalg_vector_norm.default)
def lower_vector_norm(
    builder: Builder,
    self: Value,
    ord: Operand = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Value:
    """``(Σ |x|^ord)^(1/ord)`` over ``dim`` (all dimensions for None).

    For ±∞ it is the largest or smallest |x|, for 0 the number of elements that are not 0. These, 1
    and 2 are never symbols.
    """
    split = Reducing(self, dims_of(self, dim))
    compute = compute_dtype(builder.out.dtype)
    x = cast(split.body(), compute)
    if ord in (float("inf"), float("-inf")):
        kind = "maximum" if ord > 0 else "minimum"
        result = split.reduce(builder, kind, abs(x), keepdim=keepdim, name="wide")
        return converted(builder, result)
    total = split.reduce(builder, "sum", norm_term(x, ord), keepdim=keepdim, name="sum")
    body = cast(norm_of_sum(total.body, ord), builder.out.dtype)
    return builder.pointwise(body, total.sizes)


def norm_term(x: Scalar, p: Operand) -> Scalar:
    """What a p-norm sums up of an element; p is not infinite. 0, 1 and 2 are never symbols."""
    powers = {0: cast(apply("ne", x, 0), x.dtype), 1: abs(x), 2: apply("square", x)}
    return powers[int(p)] if p in powers else apply("pow", abs(x), operand(p, (), x.dtype))


def norm_of_sum(total: Scalar, p: Operand) -> Scalar:
    """The p-norm whose terms have this sum."""
    if p in (0, 1):
        return total
    if p == 2:
        return apply("sqrt", total)
    return apply("pow", total, const(1, total.dtype) / operand(p, (), total.dtype))
