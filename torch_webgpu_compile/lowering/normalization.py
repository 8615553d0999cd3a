"""Softmax and normalisation layers, in few nodes. Source: ATen schemas of the same names.

All compute in float32 for 16-bit floats. Batch norm in evaluation is one affine node of its input,
so that it can be the epilogue of the convolution before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ir.scalar import Scalar, apply, cast, const
from ..symbolic.sizes import Expr, IntLike, as_expr
from .builder import Builder, operand
from .promotion import Operand, compute_dtype
from .reductions import Reducing, converted, count_scalar, dims_of, variance
from .registry import NotLowered, lowers
from .value import Value, channelwise, expand, reshape

aten = torch.ops.aten


@lowers(aten._softmax.default)
def lower_softmax(builder: Builder, self: Value, dim: int, half_to_float: bool) -> Value:
    """``exp(x − max) / Σ exp(x − max)`` along ``dim``, rounded once to the result's dtype.

    Computed in float32 for 16-bit floats; ``half_to_float`` only changes the dtype of the result.
    """
    split, shifted = _shifted(builder, self, dim)
    grown = builder.pointwise(apply("fast_exp", shifted), self.sizes, name="exp")
    total = split.reduce(builder, "sum", split.body(grown), keepdim=True, name="sum")
    body = grown.body / expand(total, self.sizes).body
    return builder.pointwise(cast(body, builder.out.dtype), self.sizes)


@lowers(aten._log_softmax.default)
def lower_log_softmax(builder: Builder, self: Value, dim: int, half_to_float: bool) -> Value:
    """``(x − max) − log Σ exp(x − max)`` along ``dim``, rounded once to the result's dtype.

    Computed in float32 for 16-bit floats; ``half_to_float`` only changes the dtype of the result.
    """
    split, shifted = _shifted(builder, self, dim)
    moved = builder.pointwise(shifted, self.sizes, name="shifted")
    total = split.reduce(
        builder, "sum", apply("fast_exp", split.body(moved)), keepdim=True, name="sum"
    )
    logarithm = builder.pointwise(apply("log", total.body), total.sizes, name="log")
    body = moved.body - expand(logarithm, self.sizes).body
    return builder.pointwise(cast(body, builder.out.dtype), self.sizes)


def _shifted(builder: Builder, value: Value, dim: int) -> tuple[Reducing, Scalar]:
    """x minus the maximum along ``dim``."""
    dtype = compute_dtype(value.dtype)
    split = Reducing(value, dims_of(value, dim))
    largest = split.reduce(builder, "maximum", cast(split.body(), dtype), keepdim=True, name="max")
    if not split.dims:
        largest = value.cast(dtype)
    return split, cast(value.body, dtype) - expand(largest, value.sizes).body


@lowers(aten._softmax_backward_data.default)
def lower_softmax_backward(
    builder: Builder, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """``y · (g − Σ g · y)`` along ``dim``, for the result y of softmax and its gradient g."""
    dtype = compute_dtype(grad_output.dtype)
    grad, y = grad_output.cast(dtype), output.cast(dtype)
    split = Reducing(grad, dims_of(grad, dim))
    product = split.body() * split.body(y)
    total = split.reduce(builder, "sum", product, keepdim=True, name="sum")
    body = y.body * (grad.body - expand(total, grad.sizes).body)
    return builder.pointwise(cast(body, builder.out.dtype), grad.sizes)


@lowers(aten._log_softmax_backward_data.default)
def lower_log_softmax_backward(
    builder: Builder, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """``g − exp(y) · Σ g`` along ``dim``, for the result y of log_softmax and its gradient g."""
    dtype = compute_dtype(grad_output.dtype)
    grad, y = grad_output.cast(dtype), output.cast(dtype)
    split = Reducing(grad, dims_of(grad, dim))
    total = split.reduce(builder, "sum", split.body(), keepdim=True, name="sum")
    body = grad.body - apply("fast_exp", y.body) * expand(total, grad.sizes).body
    return builder.pointwise(cast(body, builder.out.dtype), grad.sizes)


def _normalized(
    builder: Builder, value: Value, dims: Sequence[int], eps: Operand
) -> tuple[Scalar, Value, Value, Value]:
    """((x − mean) · rstd, mean, rstd, variance) over ``dims``, all in the compute dtype."""
    dtype = compute_dtype(value.dtype)
    var, mean = variance(builder, Reducing(value, dims), 0, dtype, keepdim=True)
    body = apply("rsqrt", var.body + operand(eps, (), dtype))
    rstd = builder.pointwise(body, var.sizes, name="rstd")
    centered = cast(value.body, dtype) - expand(mean, value.sizes).body
    return centered * expand(rstd, value.sizes).body, mean, rstd, var


def _affine_by_channel(
    body: Scalar, input: Value, weight: Value | None, bias: Value | None
) -> Scalar:
    """body · weight + bias, with vectors over dimension 1 of ``input``."""
    vectors = (None if v is None else channelwise(v, input) for v in (weight, bias))
    return _affine(body, input.sizes, *vectors)


def _affine(
    body: Scalar, sizes: Sequence[Expr], weight: Value | None, bias: Value | None
) -> Scalar:
    """body · weight + bias, both broadcasting to ``sizes``."""
    if weight is not None:
        body *= cast(expand(weight, sizes).body, body.dtype)
    if bias is not None:
        body += cast(expand(bias, sizes).body, body.dtype)
    return body


def _statistic(builder: Builder, value: Value, result: int) -> Value:
    """A mean or rstd as result number ``result`` of the operator."""
    signature = builder.result(result)
    return converted(builder, reshape(value, signature.sizes), signature.dtype)


@lowers(aten.native_layer_norm.default)
def lower_layer_norm(
    builder: Builder,
    input: Value,
    normalized_shape: Sequence[IntLike],
    weight: Value | None,
    bias: Value | None,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    """(output, mean, 1/std), with statistics over the dimensions of ``normalized_shape``.

    The output is ``(x − mean) / sqrt(var + eps) · weight + bias``; statistics keep the reduced
    dimensions as size 1.
    """
    dims = range(input.rank - len(normalized_shape), input.rank)
    body, mean, rstd, _ = _normalized(builder, input, dims, eps)
    body = _affine(body, input.sizes, weight, bias)
    out = builder.pointwise(cast(body, builder.out.dtype), input.sizes)
    return out, _statistic(builder, mean, 1), _statistic(builder, rstd, 2)


@lowers(aten.native_group_norm.default)
def lower_group_norm(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    N: IntLike,
    C: IntLike,
    HxW: IntLike,
    group: int,
    eps: Operand,
) -> tuple[Value, Value, Value]:
    """(output, mean, 1/std) of [N, C, *space], with statistics over each group of channels.

    The statistics have the sizes [N, group].
    """
    batch, channels, *space = input.sizes
    grouped = reshape(input, [batch, as_expr(group), channels // group, *space])
    body, mean, rstd, _ = _normalized(builder, grouped, range(2, grouped.rank), eps)
    normalized = Value(body.dtype, grouped.sizes, body)
    body = _affine_by_channel(reshape(normalized, input.sizes).body, input, weight, bias)
    out = builder.pointwise(cast(body, builder.out.dtype), input.sizes)
    return out, _statistic(builder, mean, 1), _statistic(builder, rstd, 2)


@lowers(aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default)
def lower_batch_norm(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Value, ...]:
    """(output, mean, 1/std) of [N, C, *space], with statistics over all but the channels.

    Without running statistics those of the batch are used; in evaluation the running ones, and then
    the saved statistics are empty. The functional operator has two results more, the new running
    statistics. Raises NotLowered: in training for another one that would have to change them.
    """
    running = [value for value in (running_mean, running_var) if value is not None]
    is_functional = len(builder.results) > 3
    if bool(running) == training and not (is_functional and running):
        raise NotLowered("batch norm that changes its arguments")
    if training:
        dims = [k for k in range(input.rank) if k != 1]
        body, mean, rstd, var = _normalized(builder, input, dims, eps)
        body = _affine_by_channel(body, input, weight, bias)
        out = builder.pointwise(cast(body, builder.out.dtype), input.sizes)
        saved = _statistic(builder, mean, 1), _statistic(builder, rstd, 2)
        if is_functional:
            count = count_scalar(input.numel // input.sizes[1], mean.dtype)
            running = [
                _blend(builder, running[0], mean, momentum, const(1, mean.dtype)),
                _blend(builder, running[1], var, momentum, count / (count - 1)),
            ]
    else:
        mean, var = running
        out = _batch_norm_output(builder, input, weight, bias, mean, var, eps)
        saved = builder.zeros(1), builder.zeros(2)
    changed = enumerate(running, 3) if is_functional else ()
    return out, *saved, *(_statistic(builder, value, k) for k, value in changed)


@lowers(aten._native_batch_norm_legit_no_training.default)
def lower_batch_norm_eval(
    builder: Builder, input: Value, weight: Value | None, bias: Value | None, *rest: Any
) -> tuple[Value, ...]:
    """`lower_batch_norm` in evaluation; ``rest`` is (mean, variance, momentum, eps).

    One pointwise body over [N, C, *space], so that it can be the epilogue of a convolution.
    """
    mean, var, *numbers = rest
    return lower_batch_norm(builder, input, weight, bias, mean, var, False, *numbers)


@lowers(aten._native_batch_norm_legit.no_stats)
def lower_batch_norm_no_stats(
    builder: Builder, input: Value, weight: Value | None, bias: Value | None, *rest: Any
) -> tuple[Value, ...]:
    """`lower_batch_norm` with statistics of the batch; ``rest`` is (training, momentum, eps)."""
    return lower_batch_norm(builder, input, weight, bias, None, None, True, *rest[1:])


def _batch_norm_output(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    eps: Operand,
) -> Value:
    """x · scale + shift with scale = weight · rstd and shift = bias − mean · scale."""
    dtype = compute_dtype(input.dtype)

    def channel(vector: Value) -> Scalar:
        return cast(expand(channelwise(vector, input), input.sizes).body, dtype)

    scale = apply("rsqrt", channel(var) + operand(eps, (), dtype))
    if weight is not None:
        scale *= channel(weight)
    body = (cast(input.body, dtype) - channel(mean)) * scale
    if bias is not None:
        body += channel(bias)
    return builder.pointwise(cast(body, builder.out.dtype), input.sizes)


def _blend(builder: Builder, old: Value, new: Value, momentum: Operand, unbias: Scalar) -> Value:
    """(1 − momentum) · old + momentum · new · unbias."""
    dtype = compute_dtype(old.dtype)
    share = operand(momentum, (), dtype)
    kept = cast(old.body, dtype) * (1 - share)
    fresh = cast(reshape(new, old.sizes).body, dtype) * cast(unbias, dtype)
    return builder.pointwise(cast(kept + fresh * share, dtype), old.sizes, name="running")
