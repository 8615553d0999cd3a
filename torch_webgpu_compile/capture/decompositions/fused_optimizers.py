"""Fused optimizers: a step of all parameters as one operator.

The rules give new values and change nothing: they decompose the functional operators, and the
in-place ones write what they give. A rule is for one parameter and gives a tensor of each list that
the functional operator returns, None for what there is none of; tensors that stay as they are, such
as gradients without a scale, are the arguments themselves. Numbers are computed in float32 for
parameters of 16 bits, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.dtypes import opmath
from ...torch_private import OpOverload

aten = torch.ops.aten

Tensors = Sequence[Tensor]
NumberOrTensor = float | Tensor
Results = tuple[Tensor | None, ...]


def _changed(target: Tensor, value: Tensor, found_inf: Tensor | None) -> Tensor:
    """What becomes of ``target``: the value, unless an infinity was found."""
    if found_inf is not None:
        value = torch.where(found_inf != 0, opmath(target), value)
    return value.to(target.dtype)


def _gradient(
    grad: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, maximize: bool
) -> tuple[Tensor, Tensor]:
    """The gradient to use, and what becomes of the argument: it is unscaled as well, as in
    PyTorch's kernels.
    """
    value, after = opmath(grad), grad
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
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
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
) -> Results:
    """Adam; ``decoupled``: weight decay apart from the gradient. Source: ATen
    ``fused_adam_utils.cuh``.
    """
    gradient, unscaled = _gradient(grad, grad_scale, found_inf, maximize)
    value = opmath(param)
    if weight_decay != 0:
        if decoupled:
            value = value - value * lr * weight_decay
        else:
            gradient = gradient + value * weight_decay
    first = opmath(exp_avg)
    first = first + (gradient - first) * (1 - beta1)
    second = opmath(exp_avg_sq) * beta2 + gradient * gradient * (1 - beta2)
    largest, changed = second, max_exp_avg_sq
    if amsgrad:
        assert max_exp_avg_sq is not None
        largest = torch.maximum(opmath(max_exp_avg_sq), second)
        changed = _changed(max_exp_avg_sq, largest, found_inf)
    denominator = largest.sqrt() / _bias_correction(beta2, step) ** 0.5 + eps
    update = first / denominator / _bias_correction(beta1, step)
    return (
        _changed(param, value - update * lr, found_inf),
        unscaled,
        _changed(exp_avg, first, found_inf),
        _changed(exp_avg_sq, second, found_inf),
        changed,
    )


def sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
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
) -> Results:
    """``_fused_sgd``; no momentum buffers without momentum."""
    gradient, unscaled = _gradient(grad, grad_scale, found_inf, maximize)
    value, changed = opmath(param), None
    if weight_decay != 0:
        gradient = gradient + value * weight_decay
    if momentum_buffer is not None:
        buffer = gradient
        if not is_first_step:
            buffer = opmath(momentum_buffer) * momentum + gradient * (1 - dampening)
        changed = _changed(momentum_buffer, buffer, found_inf)
        gradient = gradient + buffer * momentum if nesterov else buffer
    return _changed(param, value - gradient * lr, found_inf), unscaled, changed


def adagrad(
    param: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    step: Tensor,
    *,
    lr: NumberOrTensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Results:
    """``_fused_adagrad``."""
    gradient, unscaled = _gradient(grad, grad_scale, found_inf, maximize)
    value = opmath(param)
    if weight_decay != 0:
        gradient = gradient + value * weight_decay
    total = opmath(state_sum) + gradient * gradient
    update = gradient / (total.sqrt() + eps) / ((step - 1) * lr_decay + 1)
    changed = _changed(state_sum, total, found_inf)
    return _changed(param, value - update * lr, found_inf), unscaled, changed, step


def _of_all(rule: Callable[..., Results], *lists: Tensors, **options: Any) -> list[list[Tensor]]:
    """What the rule gives for each parameter, as lists; one of no tensors stays empty."""
    rows = [rule(*tensors, **options) for tensors in zip_longest(*lists)]
    return [[x for x in column if x is not None] for column in zip(*rows, strict=True)]


def _in_place(rule: Callable[..., Results], *lists: Tensors, **options: Any) -> None:
    for targets, values in zip(lists, _of_all(rule, *lists, **options), strict=False):
        for target, value in zip(targets, values, strict=True):
            if value is not target:
                target.copy_(value)


_RULES: dict[str, Callable[..., Results]] = {
    "_fused_adam": partial(_adam, False),
    "_fused_adamw": partial(_adam, True),
    "_fused_sgd": sgd,
    "_fused_adagrad": adagrad,
}


def _overloads(name: str) -> list[OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in ("default", "tensor_lr")]


DECOMPOSITIONS: dict[Any, Any] = {
    op: partial(_of_all, rule) for name, rule in _RULES.items() for op in _overloads(name)
}
REWRITES: dict[OpOverload, Callable[..., Any]] = {
    op: partial(_in_place, rule) for name, rule in _RULES.items() for op in _overloads(name + "_")
}
