"""``webgpu::int4_linear``: a linear layer whose weight is int4 in groups, as torchao's Int4Tensor.

The packed weight is int8 (N, K / 2), in rows, the even element of a pair in the lower half: eight
elements are a word of 32 bits. An element q of [-8, 7] stands for q · scale + zero point, which
are (K / group, N) and floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_private import OpOverload


def unpacked(packed: Tensor) -> Tensor:
    """int32 in [0, 16): the elements of rows of int32 or int8, the lowest bits first.

    Args:
        packed: (…, K / 8) of int32, or (…, K / 2) of int8.

    Returns:
        (…, K)
    """
    bits = 8 * packed.dtype.itemsize
    shifts = torch.arange(0, bits, 4, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & 15).flatten(-2)


def affine(levels: Tensor, group_size: int, scale: Tensor, zero_point: Tensor) -> Tensor:
    """levels · scale + zero point in float32.

    Args:
        levels: integers, (…, N, K).
        group_size: elements of a row that share scale and zero point.
        scale, zero_point: (…, K / group_size, N) of floats.
    """
    grouped = levels.float().reshape(*levels.shape[:-1], -1, group_size)
    scaled = grouped * scale.float().mT[..., None] + zero_point.float().mT[..., None]
    return scaled.flatten(-2)


def dequantized(weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The weight (…, N, K) in float32, of the operator's arguments (and of batches of them)."""
    # The sign of four bits is shifted to that of an int32, and back.
    shifts = torch.arange(28, 20, -4, dtype=torch.int32, device=weight.device)
    levels = ((weight[..., None].to(torch.int32) << shifts) >> 28).flatten(-2)
    return affine(levels, levels.shape[-1] // scale.shape[-2], scale, zero_point)


def of_parts(
    input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The operator in plain ATen: the product and the bias in float32, rounded once."""
    whole = multiplied(dequantized(weight, scale, zero_point), input.dtype)
    bias = None if bias is None else bias.to(whole.dtype)
    return torch.nn.functional.linear(input.to(whole.dtype), whole, bias).to(input.dtype)


def multiplied(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A dequantized weight in the dtype in which activations of ``dtype`` are multiplied with it.

    float16 for float16, whose matrix units take nothing else: an element loses no more than the
    activations have. bfloat16 has too few digits to be rounded to, and is multiplied in float32.

    Args:
        weight: float32.
    """
    return weight.to(dtype) if dtype is torch.float16 else weight


# The device's fallback runs it there.
_linear = torch.library.custom_op(
    "webgpu::int4_linear", of_parts, mutates_args=(), device_types="cpu"
)


@_linear.register_fake
def _(
    input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bias: Tensor | None = None
) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, *weight, bias = inputs
    ctx.save_for_backward(*weight)
    ctx.has_bias = bias is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the input and the bias; a quantized weight has none."""
    given = (grad.float() @ dequantized(*ctx.saved_tensors)).to(grad.dtype)
    bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
    return given, None, None, None, bias


_linear.register_autograd(_gradients, setup_context=_save)
linear: OpOverload = torch.ops.webgpu.int4_linear.default
