"""Operators that are traced as other ones, most of them because they change their arguments.

These are written with in-place operators, which the trace makes functional. An operator is here if
it has no decomposition, or none that is wanted, or if its schema does not say what it changes. Each
function takes the arguments of the ATen schema.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_ops.dtypes import opmath
from ...torch_private import OpOverload
from ..attention.operators import attention
from ..decompositions import fused_optimizers
from ..tracing import call_with_symbols

aten = torch.ops.aten

Tensors = Sequence[Tensor]


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
    """Batch norm that updates the running statistics, if there are any.

    The operator changes these arguments, which its schema does not say.
    """
    if running_mean is None or running_var is None:
        if not training:
            raise RuntimeError("batch norm needs running statistics in evaluation mode")
        op = aten._native_batch_norm_legit.no_stats
        return call_with_symbols(op, input, weight, bias, training, momentum, eps)
    running = running_mean, running_var
    if not training:
        op = aten._native_batch_norm_legit_no_training.default
        return call_with_symbols(op, input, weight, bias, *running, momentum, eps)
    op = aten._native_batch_norm_legit_functional.default
    *results, mean, variance = call_with_symbols(
        op, input, weight, bias, *running, training, momentum, eps
    )
    _assign(running, (mean, variance))
    return tuple(results)


def native_batch_norm_out(
    *arguments: Any, out: Tensor, save_mean: Tensor, save_invstd: Tensor
) -> Any:
    """`native_batch_norm` to given tensors, which are resized where their sizes differ."""
    results = out, save_mean, save_invstd
    values = native_batch_norm(*arguments)
    for target, value in zip(results, values, strict=True):
        if target.shape != value.shape:
            target.resize_(value.shape)
    _assign(results, values)
    return results


def _of_one_dtype(op: OpOverload) -> Callable[..., Any]:
    """Bags of embeddings, of which all integers are of the wider dtype of indices and offsets.

    Kernels promote them; on tensors without contents, results have the dtype of the offsets.
    """

    def call(weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any, **named: Any) -> Any:
        dtype = torch.promote_types(indices.dtype, offsets.dtype)
        return op(weight, indices.to(dtype), offsets.to(dtype), *options, **named)

    return call


def randperm_out(n: int, *, generator: None, out: Tensor) -> Tensor:
    """``randperm`` into a tensor of n elements; what all of its overloads call."""
    return out.copy_(aten.randperm.default(n, dtype=out.dtype, device=out.device))


def constant_pad_nd(self: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Without a pad above 0 it is a copy of a view, whose strides the copy keeps as the CPU's does.

    Sizes and pads may be symbols, of which PyTorch's own rule gives other strides.
    """
    if max(pad, default=0) > 0 or len(pad) % 2 or len(pad) > 2 * self.dim():
        padded: Tensor = call_with_symbols(aten.constant_pad_nd.default, self, pad, value)
        return padded
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        self = self.narrow(-dim, -before, self.shape[-dim] + before + after)
    return self.clone()


def _scan_helper(op: OpOverload) -> Callable[..., None]:
    """``_cummax_helper`` or ``_cummin_helper``, which the operator without ``_helper`` calls."""

    def call(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
        _assign((values, indices), op(self, dim))

    return call


def _assign(targets: Tensors, values: Tensors) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def unscale(grads: Tensors, found_inf: Tensor, inv_scale: Tensor) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_``; ``found_inf`` becomes 1 at an inf or NaN."""
    for grad in grads:
        infinite = (~torch.isfinite(grad)).any().to(found_inf.dtype)
        found_inf.copy_(torch.maximum(found_inf, infinite))
        grad.copy_((opmath(grad) * inv_scale).reshape(grad.shape))


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


def layer_norm(*arguments: Any) -> Tensor:
    """``layer_norm`` without its switch: its parts in C++ would take ``eps`` for a constant."""
    result: Tensor = call_with_symbols(aten.native_layer_norm.default, *arguments)[0]
    return result


REWRITES: dict[OpOverload, Callable[..., Any]] = {
    aten.layer_norm.default: layer_norm,
    aten.scaled_dot_product_attention.default: attention,
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm.out: native_batch_norm_out,
    aten._embedding_bag.default: _of_one_dtype(aten._embedding_bag.default),
    aten._embedding_bag_forward_only.default: _of_one_dtype(
        aten._embedding_bag_forward_only.default
    ),
    aten.randperm.generator_out: randperm_out,
    aten.constant_pad_nd.default: constant_pad_nd,
    aten._cummax_helper.default: _scan_helper(aten.cummax.default),
    aten._cummin_helper.default: _scan_helper(aten.cummin.default),
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten._amp_update_scale_.default: update_scale,
    **fused_optimizers.REWRITES,
}
