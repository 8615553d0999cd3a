"""The operators of ``torch.nn.SyncBatchNorm``, which PyTorch has for CUDA alone.

Source: ATen ``native/cuda/Normalization.cuh``. Channels are dimension 1. Statistics and sums are
in float32 for tensors of 16 bits. The one that updates running statistics, which its schema does
not tell, is no rule for a graph: see `device.eager.composed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.dtypes import opmath

aten = torch.ops.aten


def _others(x: Tensor) -> list[int]:
    """All dimensions but that of channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """A tensor (C,), to be broadcast with ``x`` (N, C, …)."""
    return opmath(channels).view([-1 if dim == 1 else 1 for dim in range(x.dim())])


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and ``1 / sqrt(variance + eps)`` of each channel, the variance without correction."""
    variance, mean = torch.var_mean(opmath(input), _others(input), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """``(input - mean) * invstd * weight + bias``, in the dtype of ``input``."""
    result = (opmath(input) - _along(mean, input)) * _along(invstd, input)
    if weight is not None:
        result = result * _along(weight, input)
    if bias is not None:
        result = result + _along(bias, input)
    return result.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ grad, Σ grad · (input - mean), and the gradients of weight and bias; all (C,).

    All four are given, whichever are asked for.
    """
    gradient, others = opmath(grad_out), _others(input)
    sums = gradient.sum(others)
    products = (gradient * (opmath(input) - _along(mean, input))).sum(others)
    dtype = input.dtype if weight is None else weight.dtype
    return sums, products, (products * invstd).to(dtype), sums.to(dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """The gradient of ``input``. ``count``: the number of values of a channel in each process."""
    total = count.sum().to(mean.dtype)
    slope = _along(sum_dy_xmu / total * invstd * invstd, input)
    centred = opmath(input) - _along(mean, input)
    result = opmath(grad_out) - _along(sum_dy / total, input) - centred * slope
    scale = invstd if weight is None else invstd * weight
    return (result * _along(scale, input)).to(input.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_stats.default: batch_norm_stats,
    aten.batch_norm_elemt.default: batch_norm_elemt,
    aten.batch_norm_backward_reduce.default: batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: batch_norm_backward_elemt,
}
