"""Operators that change their arguments, written with in-place operators.

The trace makes them functional. An operator is here if it has no decomposition, or if its schema
does not say what it changes. Each function takes the arguments of the ATen schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

Tensors = Sequence[Tensor]
Number = float | Tensor


def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """It changes the running statistics, if any, which its schema does not say."""
    if running_mean is None or running_var is None:
        if not training:
            raise RuntimeError("batch norm needs running statistics in evaluation mode")
        return aten._native_batch_norm_legit.no_stats(input, weight, bias, training, momentum, eps)
    if not training:
        return aten._native_batch_norm_legit_no_training.default(
            input, weight, bias, running_mean, running_var, momentum, eps
        )
    return aten._native_batch_norm_legit.default(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )


def native_batch_norm_out(
    *arguments: Any, out: Tensor, save_mean: Tensor, save_invstd: Tensor
) -> Any:
    """Resizes the tensors it writes."""
    results = out, save_mean, save_invstd
    values = native_batch_norm(*arguments)
    for target, value in zip(results, values, strict=True):
        if target.shape != value.shape:
            target.resize_(value.shape)
    _assign(results, values)
    return results


def cummax_helper(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
    """``_cummax_helper``, which ``cummax`` calls on a device."""
    _assign((values, indices), aten.cummax.default(self, dim))


def cummin_helper(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
    """``_cummin_helper``."""
    _assign((values, indices), aten.cummin.default(self, dim))


def _assign(targets: Tensors, values: Tensors) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def unscale(grads: Tensors, found_inf: Tensor, inv_scale: Tensor) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_``; ``found_inf`` becomes 1 at an inf or NaN."""
    for grad in grads:
        infinite = (~torch.isfinite(grad)).any().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, infinite))
        grad.copy_(_wide(grad) * inv_scale)


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> Tensor:
    """``_amp_update_scale_``: smaller after an infinity, larger after enough steps without one."""
    overflow = found_inf != 0
    steps = growth_tracker + 1
    full = steps == growth_interval
    grown = scale * growth_factor
    grows = full & torch.isfinite(grown)
    scale.copy_(torch.where(overflow, scale * backoff_factor, torch.where(grows, grown, scale)))
    growth_tracker.copy_(torch.where(overflow | full, 0, steps))
    return scale


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _set(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    """Gives ``target`` a value unless an infinity was found."""
    if found_inf is not None:
        value = torch.where(found_inf != 0, _wide(target), value)
    target.copy_(value)


def _gradient(
    grad: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, maximize: bool
) -> Tensor:
    """The gradient to use; the argument is unscaled as well, as in PyTorch's kernels."""
    value = _wide(grad)
    if grad_scale is not None:
        value = value / grad_scale
        _set(grad, value, found_inf)
    return -value if maximize else value


def _bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """1 - betaˢᵗᵉᵖ, without cancellation."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else 1.0


def _adam(
    decoupled: bool,
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    for k, (param, average, square) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        grad = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = _wide(param)
        if weight_decay != 0:
            if decoupled:
                value = value - value * lr * weight_decay
            else:
                grad = grad + value * weight_decay
        first = _wide(average)
        first = first + (grad - first) * (1 - beta1)
        second = _wide(square) * beta2 + grad * grad * (1 - beta2)
        largest = torch.maximum(_wide(max_exp_avg_sqs[k]), second) if amsgrad else second
        step = state_steps[k]
        denominator = largest.sqrt() / _bias_correction(beta2, step) ** 0.5 + eps
        update = first / denominator / _bias_correction(beta1, step)
        _set(param, value - update * lr, found_inf)
        _set(average, first, found_inf)
        _set(square, second, found_inf)
        if amsgrad:
            _set(max_exp_avg_sqs[k], largest, found_inf)


def fused_adam(*arguments: Any, **keywords: Any) -> None:
    """``_fused_adam_``; source: ATen ``fused_adam_utils.cuh``."""
    _adam(False, *arguments, **keywords)


def fused_adamw(*arguments: Any, **keywords: Any) -> None:
    """``_fused_adamw_``: weight decay apart from the gradient."""
    _adam(True, *arguments, **keywords)


def fused_sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Number,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``_fused_sgd_``; no momentum buffers without momentum."""
    for k, param in enumerate(params):
        grad = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = _wide(param)
        if weight_decay != 0:
            grad = grad + value * weight_decay
        if momentum_buffers:
            buffer = grad
            if not is_first_step:
                buffer = _wide(momentum_buffers[k]) * momentum + grad * (1 - dampening)
            _set(momentum_buffers[k], buffer, found_inf)
            grad = grad + buffer * momentum if nesterov else buffer
        _set(param, value - grad * lr, found_inf)


def fused_adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Number,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """``_fused_adagrad_``."""
    for k, param in enumerate(params):
        grad = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = _wide(param)
        if weight_decay != 0:
            grad = grad + value * weight_decay
        total = _wide(state_sums[k]) + grad * grad
        update = grad / (total.sqrt() + eps) / ((state_steps[k] - 1) * lr_decay + 1)
        _set(state_sums[k], total, found_inf)
        _set(param, value - update * lr, found_inf)


REWRITES: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm.out: native_batch_norm_out,
    aten._cummax_helper.default: cummax_helper,
    aten._cummin_helper.default: cummin_helper,
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten._amp_update_scale_.default: update_scale,
    aten._fused_adam_.default: fused_adam,
    aten._fused_adam_.tensor_lr: fused_adam,
    aten._fused_adamw_.default: fused_adamw,
    aten._fused_adamw_.tensor_lr: fused_adamw,
    aten._fused_sgd_.default: fused_sgd,
    aten._fused_sgd_.tensor_lr: fused_sgd,
    aten._fused_adagrad_.default: fused_adagrad,
    aten._fused_adagrad_.tensor_lr: fused_adagrad,
}
