"""Softmax and normalisation layers, in few nodes. Source: ATen schemas of the same names.

All compute in float32 for 16-bit floats. Batch norm in evaluation is one affine node of its input,
so that it can be the epilogue of the convolution before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.scalar import Scalar, apply, cast, const
from ..symbolic.sizes import ONE, Expr, IntLike, as_expr
from .builder import Builder, ResultType
from .promotion import compute_dtype
from .reductions import Reducing, count_scalar, dims_of, variance
from .registry import NotLowered, lowers
from .value import Value, expand, reshape

aten = torch.ops.aten


@lowers(aten._softmax.default)
def lower_softmax(builder: Builder, self: Value, dim: int, half_to_float: bool) -> Value:
    """``exp(x − max) / Σ exp(x − max)`` along ``dim``, rounded once to the result's dtype.

    Computed in float32 for 16-bit floats; ``half_to_float`` only changes the dtype of the result.
    """
    split, shifted = _shifted(builder, self, dim)
    grown = builder.pointwise(apply("fast_exp", shifted), self.sizes, name="exp")
    total = split.reduce(builder, "sum", split.body(grown), keepdim=True, name="sum")
    body = apply("div", grown.body, expand(total, self.sizes).body)
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
    body = apply("sub", moved.body, expand(logarithm, self.sizes).body)
    return builder.pointwise(cast(body, builder.out.dtype), self.sizes)


def _shifted(builder: Builder, value: Value, dim: int) -> tuple[Reducing, Scalar]:
    """x minus the maximum along ``dim``."""
    dtype = compute_dtype(value.dtype)
    split = Reducing(value, dims_of(value, dim))
    largest = split.reduce(builder, "maximum", cast(split.body(), dtype), keepdim=True, name="max")
    if not split.dims:
        largest = value.cast(dtype)
    shifted = apply("sub", cast(value.body, dtype), expand(largest, value.sizes).body)
    return split, shifted


@lowers(aten._softmax_backward_data.default)
def lower_softmax_backward(
    builder: Builder, grad_output: Value, output: Value, dim: int, input_dtype: torch.dtype
) -> Value:
    """``y · (g − Σ g · y)`` along ``dim``, for the result y of softmax and its gradient g."""
    dtype = compute_dtype(grad_output.dtype)
    grad, y = grad_output.cast(dtype), output.cast(dtype)
    split = Reducing(grad, dims_of(grad, dim))
    product = apply("mul", split.body(), split.body(y))
    total = split.reduce(builder, "sum", product, keepdim=True, name="sum")
    body = apply("mul", y.body, apply("sub", grad.body, expand(total, grad.sizes).body))
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
    scaled = apply("mul", apply("fast_exp", y.body), expand(total, grad.sizes).body)
    body = apply("sub", grad.body, scaled)
    return builder.pointwise(cast(body, builder.out.dtype), grad.sizes)


def _reciprocal_std(variance_body: Scalar, eps: float) -> Scalar:
    return apply("rsqrt", apply("add", variance_body, const(eps, variance_body.dtype)))


def _affine(
    body: Scalar, sizes: Sequence[Expr], weight: Value | None, bias: Value | None
) -> Scalar:
    """body · weight + bias, both broadcasting to ``sizes``."""
    if weight is not None:
        body = apply("mul", body, cast(expand(weight, sizes).body, body.dtype))
    if bias is not None:
        body = apply("add", body, cast(expand(bias, sizes).body, body.dtype))
    return body


def _normalized(value: Value, mean: Value, rstd: Value) -> Scalar:
    """(x − mean) · rstd, statistics broadcasting to the value."""
    dtype = mean.dtype
    centered = apply("sub", cast(value.body, dtype), expand(mean, value.sizes).body)
    return apply("mul", centered, expand(rstd, value.sizes).body)


def _statistic(builder: Builder, value: Value, result: int) -> Value:
    """A mean or rstd as result number ``result`` of the operator."""
    signature = builder.results[result]
    assert signature is not None
    shaped = reshape(value, signature.sizes)
    if shaped.dtype is signature.dtype:
        return shaped
    return builder.pointwise(cast(shaped.body, signature.dtype), signature.sizes)


@lowers(aten.native_layer_norm.default)
def lower_layer_norm(
    builder: Builder,
    input: Value,
    normalized_shape: Sequence[IntLike],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, Value, Value]:
    """(output, mean, 1/std), with statistics over the dimensions of ``normalized_shape``.

    The output is ``(x − mean) / sqrt(var + eps) · weight + bias``; statistics keep the reduced
    dimensions as size 1.
    """
    dtype = compute_dtype(input.dtype)
    first = input.rank - len(normalized_shape)
    split = Reducing(input, range(first, input.rank))
    var, mean = variance(builder, split, 0, dtype, keepdim=True)
    rstd = builder.pointwise(_reciprocal_std(var.body, eps), var.sizes, name="rstd")
    body = _affine(_normalized(input, mean, rstd), input.sizes, weight, bias)
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
    eps: float,
) -> tuple[Value, Value, Value]:
    """(output, mean, 1/std) of [N, C, *space], with statistics over each group of channels.

    The statistics have the sizes [N, group].
    """
    dtype = compute_dtype(input.dtype)
    batch, channels, *space = input.sizes
    grouped = reshape(input, [batch, as_expr(group), channels // group, *space])
    split = Reducing(grouped, range(2, grouped.rank))
    var, mean = variance(builder, split, 0, dtype, keepdim=True)
    rstd = builder.pointwise(_reciprocal_std(var.body, eps), var.sizes, name="rstd")
    normalized = Value(dtype, grouped.sizes, _normalized(grouped, mean, rstd))
    body = reshape(normalized, input.sizes).body
    body = _affine(body, input.sizes, channelwise(weight, input), channelwise(bias, input))
    out = builder.pointwise(cast(body, builder.out.dtype), input.sizes)
    return out, _statistic(builder, mean, 1), _statistic(builder, rstd, 2)


def channelwise(vector: Value | None, like: Value) -> Value | None:
    """A vector over dimension 1 of ``like``."""
    if vector is None:
        return None
    return reshape(vector, [vector.sizes[0] if k == 1 else ONE for k in range(like.rank)])


def _empty(signature: ResultType | None) -> Value | None:
    if signature is None:
        return None
    return Value(signature.dtype, signature.sizes, const(0, signature.dtype))


@lowers(aten._native_batch_norm_legit_no_training.default)
def lower_batch_norm_eval(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """(output, empty, empty): ``(x − running_mean) / sqrt(running_var + eps) · weight + bias``.

    One pointwise body over [N, C, *space], so that it can be the epilogue of a convolution.
    """
    out = _batch_norm_output(builder, input, weight, bias, running_mean, running_var, eps)
    return out, _empty(builder.results[1]), _empty(builder.results[2])


@lowers(aten.native_batch_norm.default)
def lower_batch_norm(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """(output, mean, 1/std) of [N, C, *space].

    Without running statistics those of the batch are used; in evaluation the running ones, and then
    the saved statistics are empty. Raises NotLowered: in training with running statistics, which it
    would have to change.
    """
    if training and running_mean is None:
        return lower_batch_norm_no_stats(builder, input, weight, bias, training, momentum, eps)
    if training or running_mean is None or running_var is None:
        raise NotLowered("batch norm that changes its arguments")
    out = _batch_norm_output(builder, input, weight, bias, running_mean, running_var, eps)
    return out, _empty(builder.results[1]), _empty(builder.results[2])


def _batch_norm_output(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    eps: float,
) -> Value:
    """x · scale + shift with scale = weight · rstd and shift = bias − mean · scale."""
    dtype = compute_dtype(input.dtype)

    def channel(vector: Value) -> Scalar:
        shaped = channelwise(vector, input)
        assert shaped is not None
        return cast(expand(shaped, input.sizes).body, dtype)

    scale = _reciprocal_std(channel(var), eps)
    if weight is not None:
        scale = apply("mul", scale, channel(weight))
    body = apply("mul", apply("sub", cast(input.body, dtype), channel(mean)), scale)
    if bias is not None:
        body = apply("add", body, channel(bias))
    return builder.pointwise(cast(body, builder.out.dtype), input.sizes)


def _batch_norm_training(
    builder: Builder, input: Value, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """(output, mean, rstd, variance) with statistics of the batch, in the compute dtype."""
    dtype = compute_dtype(input.dtype)
    split = Reducing(input, [k for k in range(input.rank) if k != 1])
    var, mean = variance(builder, split, 0, dtype, keepdim=True)
    rstd = builder.pointwise(_reciprocal_std(var.body, eps), var.sizes, name="rstd")
    body = _affine(
        _normalized(input, mean, rstd),
        input.sizes,
        channelwise(weight, input),
        channelwise(bias, input),
    )
    return builder.pointwise(cast(body, builder.out.dtype), input.sizes), mean, rstd, var


def _blend(builder: Builder, old: Value, new: Value, momentum: float, unbias: Scalar) -> Value:
    """(1 − momentum) · old + momentum · new · unbias."""
    dtype = compute_dtype(old.dtype)
    kept = apply("mul", cast(old.body, dtype), const(1 - momentum, dtype))
    fresh = apply("mul", cast(reshape(new, old.sizes).body, dtype), cast(unbias, dtype))
    body = apply("add", kept, apply("mul", fresh, const(momentum, dtype)))
    return builder.pointwise(cast(body, dtype), old.sizes, name="running")


@lowers(aten._native_batch_norm_legit_functional.default)
def lower_batch_norm_functional(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    """(output, saved mean, saved rstd, new running mean, new running variance)."""
    if not training:
        out = _batch_norm_output(builder, input, weight, bias, running_mean, running_var, eps)
        empty = _empty(builder.results[1]), _empty(builder.results[2])
        mean, var = _statistic(builder, running_mean, 3), _statistic(builder, running_var, 4)
        return out, *empty, mean, var
    out, mean, rstd, var = _batch_norm_training(builder, input, weight, bias, eps)
    count = count_scalar(input.numel // input.sizes[1], mean.dtype)
    unbias = apply("div", count, apply("sub", count, const(1, mean.dtype)))
    new_mean = _blend(builder, running_mean, mean, momentum, const(1, mean.dtype))
    new_var = _blend(builder, running_var, var, momentum, unbias)
    return (
        out,
        _statistic(builder, mean, 1),
        _statistic(builder, rstd, 2),
        _statistic(builder, new_mean, 3),
        _statistic(builder, new_var, 4),
    )


@lowers(aten._native_batch_norm_legit.no_stats)
def lower_batch_norm_no_stats(
    builder: Builder,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    """(output, mean, 1/std), with statistics of the batch over all dimensions but the channels."""
    out, mean, rstd, _ = _batch_norm_training(builder, input, weight, bias, eps)
    return out, _statistic(builder, mean, 1), _statistic(builder, rstd, 2)
