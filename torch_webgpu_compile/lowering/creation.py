"""Tensors made from nothing: virtual values that cost no buffer. Source: ATen factory schemas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import dtypes
from ..dtypes import DType
from ..ir.scalar import Index, Scalar, apply, cast, where
from ..symbolic.sizes import Expr, IntLike, as_expr
from .builder import Builder, operand
from .promotion import compute_dtype
from .registry import lowers
from .symbols import literal
from .value import Value, positions

aten = torch.ops.aten
NumberLike = bool | int | float | Expr | Value


def filled(value: NumberLike, sizes: Sequence[Expr], dtype: DType) -> Value:
    """A value that is the same everywhere."""
    if isinstance(value, (Value, Expr)):
        return Value(dtype, tuple(sizes), operand(value, sizes, dtype))
    return Value(dtype, tuple(sizes), literal(value, dtype))


@lowers(aten.full.default, aten.new_full.default, aten.full_like.default)
def lower_full(builder: Builder, *arguments: Any, **options: Any) -> Value:
    """The fill value, which is the last positional argument, everywhere."""
    return filled(arguments[-1], builder.out.sizes, builder.out.dtype)


@lowers(aten.scalar_tensor.default)
def lower_scalar_tensor(builder: Builder, s: NumberLike, **options: Any) -> Value:
    """A tensor without dimensions that holds ``s``."""
    return filled(s, (), builder.out.dtype)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def lower_fill(builder: Builder, self: Value, value: NumberLike) -> Value:
    """``value`` everywhere, in the sizes and dtype of ``self``."""
    return filled(value, builder.out.sizes, builder.out.dtype)


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten._efficientzerotensor.default,
)
def lower_zeros(builder: Builder, *arguments: Any, **options: Any) -> Value:
    """0 everywhere, in the sizes and dtype of the operator's fake result."""
    return filled(0, builder.out.sizes, builder.out.dtype)


@lowers(
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    torch.ops.prims.empty_strided.default,
)
def lower_empty(builder: Builder, *arguments: Any, **options: Any) -> Value:
    """Memory with unspecified contents: zeros, or (``fill_empty``) NaN or the largest integer.

    The latter is what ``torch.use_deterministic_algorithms`` asks for, so that reads of unwritten
    memory show.
    """
    out = builder.out
    builder.on_deterministic()
    if not builder.fill_empty:
        return filled(0, out.sizes, out.dtype)
    value = math.nan if out.dtype.is_float else out.dtype.highest
    return filled(value, out.sizes, out.dtype)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def lower_ones(builder: Builder, *arguments: Any, **options: Any) -> Value:
    """1 everywhere, in the sizes and dtype of the operator's fake result."""
    return filled(1, builder.out.sizes, builder.out.dtype)


@lowers(aten.arange.start_step, aten.arange.start, aten.arange.default)
def lower_arange(builder: Builder, *bounds: NumberLike, **options: Any) -> Value:
    """``start + k · step`` for every position k; the fake result says how many.

    ``bounds`` is (end,), (start, end) or (start, end, step); they start at 0, with a step of 1.
    """
    start = bounds[0] if len(bounds) > 1 else 0
    return _arange(builder, start, bounds[2] if len(bounds) > 2 else 1)


def _arange(builder: Builder, start: NumberLike, step: NumberLike) -> Value:
    """start + i · step, in int64, float32 or float64 (PyTorch's accumulation type)."""
    out = builder.out
    (position,) = positions(out.sizes)
    integral = out.dtype.is_integer
    if integral and not any(isinstance(a, (float, Value)) for a in (start, step)):
        expr = as_expr(_integer(start)) + position * as_expr(_integer(step))
        return Value(out.dtype, out.sizes, cast(Index(expr), out.dtype))
    wide = dtypes.int64 if integral else compute_dtype(out.dtype)
    body: Scalar = cast(Index(position), wide)
    body *= operand(step, (), wide)
    body += operand(start, (), wide)
    return builder.pointwise(cast(body, out.dtype), out.sizes)


def _integer(value: NumberLike) -> IntLike:
    assert isinstance(value, (int, Expr)), value
    return value


@lowers(torch.ops.prims.iota.default)
def lower_iota(builder: Builder, length: IntLike, **options: Any) -> Value:
    """``start + k · step`` for ``length`` positions k; 0 and 1 where they are not given."""
    return _arange(builder, options.get("start", 0), options.get("step", 1))


@lowers(aten.eye.default, aten.eye.m)
def lower_eye(builder: Builder, *arguments: Any, **options: Any) -> Value:
    """1 on the main diagonal of a matrix, 0 elsewhere."""
    out = builder.out
    row, column = positions(out.sizes)
    equal = apply("eq", Index(row), Index(column))
    return Value(out.dtype, out.sizes, cast(equal, out.dtype))


def _register_triangle(name: str, comparison: str) -> None:
    @lowers(getattr(aten, name).default)
    def lower(builder: Builder, self: Value, diagonal: IntLike = 0) -> Value:
        """[…, m, n] with 0 where column > row + diagonal, or < for the upper triangle."""
        row, column = positions(self.sizes)[-2:]
        keep = apply(comparison, Index(column), Index(row + diagonal))
        return builder.pointwise(where(keep, self.body, 0), self.sizes)


_register_triangle("tril", "le")
_register_triangle("triu", "ge")
