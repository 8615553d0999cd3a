"""Fused optimizers: a step of all parameters as one operator.

The rules give new values and change nothing: they decompose the functional operators, and the
in-place ones write what they give. A rule gives a list for each list that the functional operator
returns; tensors that stay as they are, such as gradients without a scale, are the arguments
themselves. Numbers are computed in float32 for parameters of 16 bits, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...torch_private import OpOverload

aten = torch.ops.aten

Tensors = Sequence[Tensor]
NumberOrTensor = float | Tensor
Lists = tuple[list[Tensor], ...]


def wide(tensor: Tensor) -> Tensor:
    """A tensor of 16 bits in float32, any other as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _changed(target: Tensor, value: Tensor, found_inf: Tensor | None) -> Tensor:
    """What becomes of ``target``: the value, unless an infinity was found."""
    if found_inf is not None:
        value = torch.where(found_inf != 0, wide(target), value)
    return value.to(target.dtype)


def _gradient(
    grad: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, maximize: bool
) -> tuple[Tensor, Tensor]:
    """The gradient to use, and what becomes of the argument: it is unscaled as well, as in
    PyTorch's kernels.
    """
    value, after = wide(grad), grad
    if grad_scale is not None:
        value = value / grad_scale
        after = _changed(grad, value, found_inf)
    return -value if maximize else value, after


def _bias_correction(beta: float, step: Tensor) -> Tensor | float:
    """1 - betaˢᵗᵉᵖ, without cancellation; a symbol is positive."""
    if isinstance(beta, torch.SymFloat):
        return -torch.expm1(step * torch.full_like(step, beta).log())
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
    lr: NumberOrTensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    """Adam; ``decoupled``: weight decay apart from the gradient. Source: ATen
    ``fused_adam_utils.cuh``.
    """
    lists: Lists = ([], [], [], [], [])
    for k, (param, average, square) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        grad, unscaled = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = wide(param)
        if weight_decay != 0:
            if decoupled:
                value = value - value * lr * weight_decay
            else:
                grad = grad + value * weight_decay
        first = wide(average)
        first = first + (grad - first) * (1 - beta1)
        second = wide(square) * beta2 + grad * grad * (1 - beta2)
        largest = torch.maximum(wide(max_exp_avg_sqs[k]), second) if amsgrad else second
        step = state_steps[k]
        denominator = largest.sqrt() / _bias_correction(beta2, step) ** 0.5 + eps
        update = first / denominator / _bias_correction(beta1, step)
        values = [(param, value - update * lr), (average, first), (square, second)]
        if amsgrad:
            values.append((max_exp_avg_sqs[k], largest))
        changed = [_changed(target, new, found_inf) for target, new in values]
        changed.insert(1, unscaled)
        for found, new in zip(lists, changed, strict=False):
            found.append(new)
    return lists if amsgrad else (*lists[:4], list(max_exp_avg_sqs))


def sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: NumberOrTensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    """``_fused_sgd``; no momentum buffers without momentum."""
    new_params, new_grads, new_buffers = [], [], []
    for k, param in enumerate(params):
        grad, unscaled = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = wide(param)
        if weight_decay != 0:
            grad = grad + value * weight_decay
        if momentum_buffers:
            buffer = grad
            if not is_first_step:
                buffer = wide(momentum_buffers[k]) * momentum + grad * (1 - dampening)
            new_buffers.append(_changed(momentum_buffers[k], buffer, found_inf))
            grad = grad + buffer * momentum if nesterov else buffer
        new_params.append(_changed(param, value - grad * lr, found_inf))
        new_grads.append(unscaled)
    return new_params, new_grads, new_buffers


def adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: NumberOrTensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    """``_fused_adagrad``."""
    new_params, new_grads, new_sums = [], [], []
    for k, param in enumerate(params):
        grad, unscaled = _gradient(grads[k], grad_scale, found_inf, maximize)
        value = wide(param)
        if weight_decay != 0:
            grad = grad + value * weight_decay
        total = wide(state_sums[k]) + grad * grad
        update = grad / (total.sqrt() + eps) / ((state_steps[k] - 1) * lr_decay + 1)
        new_sums.append(_changed(state_sums[k], total, found_inf))
        new_params.append(_changed(param, value - update * lr, found_inf))
        new_grads.append(unscaled)
    return new_params, new_grads, new_sums, list(state_steps)


def _in_place(rule: Callable[..., Lists], *lists: Tensors, **keywords: Any) -> None:
    for targets, values in zip(lists, rule(*lists, **keywords), strict=False):
        for target, value in zip(targets, values, strict=True):
            if value is not target:
                target.copy_(value)


_RULES: dict[str, Callable[..., Lists]] = {
    "_fused_adam": partial(_adam, False),
    "_fused_adamw": partial(_adam, True),
    "_fused_sgd": sgd,
    "_fused_adagrad": adagrad,
}


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in ("default", "tensor_lr")]


DECOMPOSITIONS: dict[Any, Any] = {
    op: rule for name, rule in _RULES.items() for op in _overloads(name)
}
REWRITES: dict[OpOverload, Callable[..., Any]] = {
    op: partial(_in_place, rule) for name, rule in _RULES.items() for op in _overloads(name + "_")
}
