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


def unpacked(packed: Tensor, width: int = 4, inner: int = 1, *, signed: bool = False) -> Tensor:
    """int32: numbers of ``width`` bits, the lowest bits of integers first.

    Each is repeated ``inner`` times before anything is computed of it: to a kernel, all that is
    computed of a weight is then one expression of an element, of which those of a run of elements
    have the parts in common that depend on their group.

    Args:
        packed: (…, K · width / bits of one) of int32 or int8.
        signed: whether numbers are in two's complement.

    Returns:
        (…, K · inner)
    """
    bits = 8 * packed.dtype.itemsize
    first, last, step = (32 - width, 32 - width - bits, -width) if signed else (0, bits, width)
    shifts = torch.arange(first, last, step, dtype=torch.int32, device=packed.device)[:, None]
    spread = packed[..., None, None].expand(*packed.shape, bits // width, inner)
    if signed:  # the sign is shifted to that of an int32, and back
        return ((spread.to(torch.int32) << shifts) >> (32 - width)).flatten(-3)
    return ((spread >> shifts) & ((1 << width) - 1)).flatten(-3)


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
    levels = unpacked(weight, signed=True)
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
