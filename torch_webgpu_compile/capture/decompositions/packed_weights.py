"""Products with weights of 4 and 8 bits, which stay as they are in memory.

Source: ATen ``_weight_int4pack_mm``, ``_weight_int8pack_mm`` and their kin, and
``webgpu::int4_linear`` (`torch_ops.int4`). Each becomes operations on single elements of the packed
integers and one product, which a kernel does where it reads them.

Packed int4 on the device: the weight (N, K) in rows, eight elements in an int32, element k in the
four bits from bit 4 · (k mod 8). `_convert_weight_to_int4pack` gives them the sizes that PyTorch
says, (N / 8, K / (16 · innerKTiles), 32, innerKTiles / 2), in which CUDA has tiles for its matrix
units: what was packed on one kind of device is to be unpacked on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ...torch_ops import int4

aten = torch.ops.aten


def convert_weight_to_int4pack(self: Tensor, inner_k_tiles: int) -> Tensor:
    """``aten::_convert_weight_to_int4pack``.

    Args:
        self: uint8 (N, K / 2), the even element of a pair in the upper half.
        inner_k_tiles: 2, 4 or 8, which divides K / 16; N is a multiple of 8.

    Returns:
        int32 (N / 8, K / (16 · inner_k_tiles), 32, inner_k_tiles / 2).
    """
    rows, half = self.shape
    torch._check(self.dtype is torch.uint8, lambda: f"expected uint8, got {self.dtype}")
    torch._check(inner_k_tiles in (2, 4, 8), lambda: "innerKTiles is to be 2, 4 or 8")
    torch._check(
        rows % 8 == 0 and half % (8 * inner_k_tiles) == 0,
        lambda: f"({rows}, {2 * half}) is to be a multiple of (8, {16 * inner_k_tiles})",
    )
    bytes = self.to(torch.int32)
    bytes = ((bytes >> 4) | (bytes << 4)) & 0xFF
    first, second, third, fourth = bytes.unflatten(1, (-1, 4)).unbind(2)
    words = first | (second << 8) | (third << 16) | (fourth << 24)
    return words.view(rows // 8, half // (8 * inner_k_tiles), 32, inner_k_tiles // 2)


def weight_int4pack_mm(
    self: Tensor, mat2: Tensor, group_size: int, scales_and_zeros: Tensor
) -> Tensor:
    """``aten::_weight_int4pack_mm``: x · Wᵀ of W = (q - 8) · scale + zero.

    Args:
        self: (M, K) of float32, float16 or bfloat16.
        mat2: int32, from ``_convert_weight_to_int4pack``.
        group_size: elements of a row that share scale and zero.
        scales_and_zeros: (K / group_size, N, 2).
    """
    columns = self.shape[1]
    scales, zeros = scales_and_zeros.unbind(2)
    levels = int4.unpacked(mat2.reshape(-1, columns // 8)) - 8
    return _product(self, int4.affine(levels, group_size, scales, zeros))


def weight_int4pack_mm_with_scales_and_zeros(
    self: Tensor, mat2: Tensor, group_size: int, scale: Tensor, zeros: Tensor
) -> Tensor:
    """``aten::_weight_int4pack_mm_with_scales_and_zeros``: of W = (q - zero) · scale.

    Args:
        self: (M, K) of float32, float16 or bfloat16.
        mat2: int32 (N, K / 8), eight elements in a word, the first in the lowest bits.
        group_size: elements of a row that share scale and zero.
        scale, zeros: (K / group_size, N), the latter int8.
    """
    levels = int4.unpacked(mat2).unflatten(1, (-1, group_size))
    weight = (levels - zeros.t()[..., None]).float() * scale.float().t()[..., None]
    return _product(self, weight.flatten(1))


def weight_int8pack_mm(self: Tensor, mat2: Tensor, scales: Tensor) -> Tensor:
    """``aten::_weight_int8pack_mm``: x · Wᵀ · scales of int8 (N, K) and (N,), rounded once."""
    return (self.float() @ mat2.float().t() * scales.float()).to(self.dtype)


def int4_linear(
    input: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``webgpu::int4_linear``, see `torch_ops.int4`."""
    result = input.float() @ int4.dequantized(weight, scale, zero_point).t()
    if bias is not None:
        result = result + bias.float()
    return result.to(input.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x · Wᵀ with a weight in float32, rounded once."""
    return (x.float() @ weight.t()).to(x.dtype)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._convert_weight_to_int4pack.default: convert_weight_to_int4pack,
    aten._weight_int4pack_mm.default: weight_int4pack_mm,
    aten._weight_int4pack_mm_with_scales_and_zeros.default: (
        weight_int4pack_mm_with_scales_and_zeros
    ),
    aten._weight_int8pack_mm.default: weight_int8pack_mm,
    int4.linear: int4_linear,
}
