"""Type promotion: the dtype in which an elementwise operator computes, and its result's dtype.

Source: ``torch.result_type`` and ``c10::promoteTypes``; tensors with dimensions come before 0-d
tensors, and those before Python numbers, unless the later has a higher category.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch

from .. import dtypes
from ..dtypes import DType, Kind
from ..ir.scalar import Scalar, apply, where
from ..symbolic.sizes import Expr
from ..torch_ops.dtypes import dtype_of, torch_dtype
from .value import Value

Operand = Value | Expr | bool | int | float


def category(dtype: DType) -> int:
    """0 for bool, 1 for integers, 2 for floats."""
    return {Kind.BOOL: 0, Kind.FLOAT: 2}.get(dtype.kind, 1)


def promote(left: DType | None, right: DType | None) -> DType | None:
    """The smallest dtype that both convert to; None is neutral."""
    if left is None or right is None:
        return left or right
    promoted = dtype_of(torch.promote_types(torch_dtype(left), torch_dtype(right)))
    assert promoted is not None
    return promoted


def default_float() -> DType:
    """The dtype that integers become in a float-only operator."""
    dtype = dtype_of(torch.get_default_dtype())
    assert dtype is not None
    return dtype


def number_dtype(value: Operand) -> DType:
    """The dtype of an operand; a Python number's is bool, int64 or the default float."""
    if isinstance(value, Value):
        return default_float() if value.number and value.dtype.is_float else value.dtype
    if isinstance(value, bool):
        return dtypes.bool_
    return default_float() if isinstance(value, float) else dtypes.int64


def result_dtype(operands: Iterable[Operand]) -> DType:
    """``torch.result_type`` of any number of tensors and numbers."""
    ranks: list[list[DType]] = [[], [], []]
    for operand in operands:
        is_tensor = isinstance(operand, Value) and not operand.number
        level = 2 if not is_tensor else 0 if isinstance(operand, Value) and operand.rank else 1
        ranks[level].append(number_dtype(operand))
    with_dims, zero_dim, numbers = (reduce(promote, found, None) for found in ranks)
    combined = _combine(with_dims, _combine(zero_dim, numbers))
    assert combined is not None
    return combined


def _combine(higher: DType | None, lower: DType | None) -> DType | None:
    if higher is None or lower is None:
        return higher or lower
    return higher if category(higher) >= category(lower) else promote(higher, lower)


def compute_dtype(dtype: DType) -> DType:
    """The dtype of arithmetic: float32 for narrow floats (PyTorch's opmath)."""
    return dtypes.float32 if dtype.is_float and dtype.itemsize <= 2 else dtype


def word_dtype(dtype: DType) -> DType:
    """``dtype``, or for a narrow one that of 32 bits whose elements one invocation can write.

    Sums of narrow ones wrap, or are rounded once, at last.
    """
    if dtype.itemsize >= 4:
        return dtype
    return dtypes.float32 if dtype.is_float else dtypes.int32


def float_dtype(dtype: DType) -> DType:
    """``dtype``, or the default float for integers and bool."""
    return dtype if dtype.is_float else default_float()


def rounded_to(scalar: Scalar, dtype: DType) -> Scalar:
    """A float32 number with the fraction of ``dtype``, of ties the even one; NaN stays NaN.

    A conversion would not do: kernels hold 16-bit floats as float32 until they are stored.
    """
    dropped = {dtypes.float16: 13, dtypes.bfloat16: 16}.get(dtype)
    if dropped is None:
        return scalar
    u32 = dtypes.uint32
    bits = apply("bitcast", scalar, dtype=u32)
    last = bits >> dropped
    odd = last & 1
    kept = (bits + ((1 << dropped - 1) - 1 + odd)) & -(1 << dropped)
    rounded = apply("bitcast", kept, dtype=scalar.dtype)
    if dtype is dtypes.float16:
        rounded = _within_float16(scalar, rounded)
    return where(apply("isnan", scalar), scalar, rounded)


def _within_float16(scalar: Scalar, rounded: Scalar) -> Scalar:
    """``rounded`` but for what is below float16's normal numbers, and beyond its largest."""
    steps = apply("round", scalar * 2.0**24)
    small = steps * 2.0 ** (-24)
    size = abs(scalar)
    infinite = apply("copysign", float("inf"), scalar)
    rounded = where(size < 2.0 ** (-14), small, rounded)
    return where(size >= 65520.0, infinite, rounded)
