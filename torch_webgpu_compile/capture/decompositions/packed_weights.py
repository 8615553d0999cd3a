"""Products with weights of 4 and 8 bits, which stay as they are in memory.

Source: ATen ``_weight_int4pack_mm``, ``_weight_int8pack_mm`` and their kin, and
``webgpu::int4_linear`` (`torch_ops.int4`). Each becomes operations on single elements of the packed
integers and one product, which a kernel does where it reads them.

Packed int4 on the device: the weight (N, K) in rows, eight elements in an int32, element k in the
four bits from bit 4 · (k mod 8). `_convert_weight_to_int4pack` gives them the sizes that PyTorch
says, (N / 8, K / (16 · innerKTiles), 32, innerKTiles / 2), in which CUDA has tiles for its matrix
units: what was packed on one kind of device is to be used on it. Only of what the CPU's kernel has
packed, which runs on the host for ``_convert_weight_to_int4pack_for_cpu``, the layout is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import int4
from ...torch_private import OpOverload

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
    if self.dtype is not torch.uint8 or inner_k_tiles not in (2, 4, 8):
        raise RuntimeError(f"expected uint8 and 2, 4 or 8, got {self.dtype} and {inner_k_tiles}")
    if rows % 8 or half % (8 * inner_k_tiles):
        least = f"(8, {16 * inner_k_tiles})"
        raise RuntimeError(f"expected multiples of {least}, got ({rows}, {2 * half})")
    bytes = self.to(torch.int32)
    bytes = ((bytes >> 4) | (bytes << 4)) & 0xFF
    first, second, third, fourth = bytes.reshape(rows, half // 4, 4).unbind(2)
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
    levels = int4.unpacked(mat2).reshape(mat2.shape[0], -1, group_size)
    weight = (levels - zeros.t()[..., None]).float() * scale.float().t()[..., None]
    return _product(self, weight.flatten(1))


def weight_int4pack_mm_for_cpu(
    self: Tensor, mat2: Tensor, group_size: int, scales_and_zeros: Tensor
) -> Any:
    """``aten::_weight_int4pack_mm_for_cpu``, of what the CPU's kernel has packed.

    Args:
        self, group_size, scales_and_zeros: as above.
        mat2: uint8 (N, K / 2), in the layout of the CPU at hand, N a multiple of 16.
    """
    rows = int(mat2.shape[0])
    block = _CPU_BLOCKS.get(torch.backends.cpu.get_cpu_capability())
    if block is None or rows % 16:
        return NotImplemented
    whole = rows // block * block
    parts = [_of_cpu(mat2[:whole], block, are_halves=True)] if whole else []
    if whole < rows:
        parts.append(_of_cpu(mat2[whole:], rows - whole, are_halves=False))
    levels = torch.cat(parts) - 8
    scales, zeros = scales_and_zeros.unbind(2)
    return _product(self, int4.affine(levels, group_size, scales, zeros))


# Rows of a block by what PyTorch says of the CPU (aten/src/ATen/native/cpu/int4mm_kernel.cpp).
_CPU_BLOCKS = {"AVX512": 64, "AVX2": 32}


def _of_cpu(packed: Tensor, block: int, *, are_halves: bool) -> Tensor:
    """int32 (N, K) in [0, 16), of blocks of rows that the CPU has packed column by column.

    Args:
        packed: uint8 (N, K / 2).
        block: rows of a block.
        are_halves: two rows in a byte are half a block apart, otherwise side by side.
    """
    bytes = packed.reshape(-1, 2 * packed.shape[1], block // 2).mT
    shifts = torch.arange(0, 8, 4, dtype=torch.int32, device=packed.device)
    if are_halves:
        pairs = bytes[:, None] >> shifts[:, None, None]
    else:
        pairs = bytes[:, :, None] >> shifts[:, None]
    return (pairs & 15).flatten(0, 2)


def weight_int8pack_mm(self: Tensor, mat2: Tensor, scales: Tensor) -> Tensor:
    """``aten::_weight_int8pack_mm``: x · Wᵀ · scales of int8 (N, K) and (N,), rounded once."""
    weight = mat2.to(self.dtype).float()  # exact: 16-bit floats have integers up to 256
    return (self.float() @ weight.t() * scales.float()).to(self.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x · Wᵀ of a weight in float32, rounded once; see `int4.multiplied`."""
    weight = int4.multiplied(weight, x.dtype)
    return (x.to(weight.dtype) @ weight.t()).to(x.dtype)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._convert_weight_to_int4pack.default: convert_weight_to_int4pack,
    aten._weight_int4pack_mm.default: weight_int4pack_mm,
    aten._weight_int4pack_mm_with_scales_and_zeros.default: (
        weight_int4pack_mm_with_scales_and_zeros
    ),
    aten._weight_int4pack_mm_for_cpu.default: weight_int4pack_mm_for_cpu,
    aten._weight_int8pack_mm.default: weight_int8pack_mm,
    int4.linear: int4.of_parts,
}
