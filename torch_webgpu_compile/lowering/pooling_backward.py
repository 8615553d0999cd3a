"""Gradients of pooling, gathered: each input element sums over the windows that contain it.

Source: ATen ``max_pool2d_with_indices_backward``, ``avg_pool2d_backward``, ….
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import dtypes
from ..ir.scalar import Index, Scalar, apply, cast, const, where
from ..symbolic.sizes import Expr, IntLike, ceildiv
from .builder import Builder, masked
from .convolution import all_of, in_range
from .pooling import AdaptiveWindows, Windows, spread, window_divisor
from .promotion import compute_dtype
from .reductions import converted
from .registry import lowers
from .value import Value, positions

aten = torch.ops.aten


def _gather_windows(
    builder: Builder,
    grad: Value,
    value: Value,
    kernel: Sequence[Expr],
    stride: Sequence[Expr],
    padding: Sequence[Expr],
    dilation: Sequence[Expr],
    term: Callable[[list[Expr], Scalar], Scalar],
) -> Value:
    """Σ over windows near each element of ``value`` of ``term(window index, gradient)``.

    Windows o over position p have 0 ≤ p + padding − o·stride ≤ (kernel − 1)·dilation.
    """
    rank = len(kernel)
    out = positions(value.sizes)
    lead, space = list(out[: value.rank - rank]), out[value.rank - rank :]
    reach = tuple(
        ceildiv((k - 1) * d + 1, s) for k, s, d in zip(kernel, stride, dilation, strict=True)
    )
    taps = positions(reach, "r")
    index: list[Expr] = list(lead)
    conditions: list[Scalar] = []
    for k in range(rank):
        window = (space[k] + padding[k]) // stride[k] - taps[k]
        conditions += in_range(window, grad.sizes[len(lead) + k])
        distance = space[k] + padding[k] - window * stride[k]
        conditions += in_range(distance, (kernel[k] - 1) * dilation[k] + 1)
        index.append(window)
    dtype = compute_dtype(grad.dtype)
    body = term(index, cast(grad.at(index), dtype))
    body = masked(all_of(conditions), body, 0)
    return converted(builder, builder.reduce("sum", body, value.sizes, reach))


def _max_pool_backward(
    builder: Builder,
    rank: int,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    dilation: Sequence[IntLike],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    kernel = spread(kernel_size, rank)
    space = positions(self.sizes)[self.rank - rank :]
    flat = space[0]
    for size, position in zip(self.sizes[self.rank - rank + 1 :], space[1:], strict=True):
        flat = flat * size + position

    def term(window: list[Expr], grad: Scalar) -> Scalar:
        chosen = apply("eq", indices.at(window), Index(flat))
        return where(chosen, grad, 0)

    return _gather_windows(
        builder,
        grad_output,
        self,
        kernel,
        spread(stride, rank, kernel),
        spread(padding, rank),
        spread(dilation, rank),
        term,
    )


@lowers(aten.max_pool2d_with_indices_backward.default)
def lower_max_pool2d_backward(builder: Builder, *arguments: Any) -> Value:
    """Each element of the input: Σ of the gradients of the windows whose maximum it was.

    Arguments as in ATen's schema; ``indices`` are those of `lower_max_pool2d`.
    """
    return _max_pool_backward(builder, 2, *arguments)


@lowers(aten.max_pool3d_with_indices_backward.default)
def lower_max_pool3d_backward(builder: Builder, *arguments: Any) -> Value:
    """`lower_max_pool2d_backward` for windows over the last three dimensions."""
    return _max_pool_backward(builder, 3, *arguments)


def _avg_pool_backward(
    builder: Builder,
    rank: int,
    grad_output: Value,
    self: Value,
    kernel_size: Sequence[IntLike],
    stride: Sequence[IntLike],
    padding: Sequence[IntLike],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    kernel = spread(kernel_size, rank)
    steps, pads, ones = spread(stride, rank, kernel), spread(padding, rank), spread([1], rank)
    forward = Windows(self, grad_output.sizes, kernel, steps, pads, ones)

    def term(window: list[Expr], grad: Scalar) -> Scalar:
        divisor: Scalar
        if divisor_override is not None:
            divisor = const(divisor_override, dtypes.int64)
        else:
            divisor = window_divisor(forward, count_include_pad, window[forward.lead :])
        return grad / cast(divisor, grad.dtype)

    return _gather_windows(builder, grad_output, self, kernel, steps, pads, ones, term)


@lowers(aten.avg_pool2d_backward.default)
def lower_avg_pool2d_backward(builder: Builder, *arguments: Any) -> Value:
    """Each element of the input: Σ of gradient / divisor of the windows that contain it."""
    return _avg_pool_backward(builder, 2, *arguments)


@lowers(aten.avg_pool3d_backward.default)
def lower_avg_pool3d_backward(builder: Builder, *arguments: Any) -> Value:
    """`lower_avg_pool2d_backward` for windows over the last three dimensions."""
    return _avg_pool_backward(builder, 3, *arguments)


def _adaptive_backward(builder: Builder, grad_output: Value, value: Value, rank: int) -> Value:
    """Windows over position p run from ⌊p·out/in⌋ to ⌈(p+1)·out/in⌉: the same rule, reversed."""
    windows = AdaptiveWindows(grad_output, value.sizes, rank)
    forward = AdaptiveWindows(value, grad_output.sizes, rank)
    dtype = compute_dtype(grad_output.dtype)
    count: Scalar = const(1, dtypes.int64)
    for length in forward.lengths:
        count *= Index(length)
    share = cast(grad_output.body, dtype) / cast(count, dtype)
    shares = builder.pointwise(share, grad_output.sizes, name="share")
    windows.value = shares
    body = windows.read(const(0, dtype))
    return converted(builder, builder.reduce("sum", body, value.sizes, windows.reach))


@lowers(aten._adaptive_avg_pool2d_backward.default)
def lower_adaptive_avg_pool2d_backward(builder: Builder, grad_output: Value, self: Value) -> Value:
    """Each element of the input: Σ of gradient / length of the windows that contain it."""
    return _adaptive_backward(builder, grad_output, self, 2)


@lowers(aten._adaptive_avg_pool3d_backward.default)
def lower_adaptive_avg_pool3d_backward(builder: Builder, grad_output: Value, self: Value) -> Value:
    """`lower_adaptive_avg_pool2d_backward` for the last three dimensions."""
    return _adaptive_backward(builder, grad_output, self, 3)
