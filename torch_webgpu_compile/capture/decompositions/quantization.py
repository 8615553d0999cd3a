"""Quantization: fake (in training), to integers (``torch.ops.quantized_decomposed``), products.

Source: ATen ``FakeQuantizeCore``, and ``torch.ao.quantization.fx._decomposed``, whose operators
exist once that module has been imported. There is nothing for tensors of quantized dtypes: they
are deprecated, and PyTorch itself cannot trace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...torch_private import DispatchKey, OpOverload, _int_mm

aten = torch.ops.aten

_KEY = DispatchKey.CompositeExplicitAutograd

# Operators whose composite kernel is all that there is to do, because it does not read numbers.
_COMPOSITE = (
    "quantize_per_tensor.default",
    "dequantize_per_tensor.default",
    "quantize_per_channel.default",
    "dequantize_per_channel.default",
    "choose_qparams_per_token.default",
    "choose_qparams_per_token_asymmetric.default",
    "quantize_per_token.default",
    "dequantize_per_token.default",
    "dequantize_per_channel_group.default",
    "convert_element_type.no_fuse",
)


def fake_quantize(
    self: Tensor, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """(the nearest of the numbers that integers of the range stand for, whether there is one)."""
    level = torch.round(self * (1.0 / scale)) + zero_point
    nearest = torch.where(level.isnan(), quant_min, level.clamp(quant_min, quant_max))
    kept = (level >= quant_min) & (level <= quant_max)
    return ((nearest - zero_point) * scale).to(self.dtype), kept


def fake_quantize_with_tensors(
    self: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    fake_quant_enabled: Tensor,
    quant_min: int,
    quant_max: int,
) -> tuple[Tensor, Tensor]:
    """The same with parameters from observers, which may switch it off."""
    done, kept = fake_quantize(self, scale, zero_point, quant_min, quant_max)
    enabled = fake_quant_enabled != 0
    return torch.where(enabled, done, self), kept | ~enabled


def fake_quantize_channels(
    self: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """``aten::fake_quantize_per_channel_affine_cachemask``."""
    sizes = [-1 if dim == axis % self.dim() else 1 for dim in range(self.dim())]
    return fake_quantize(
        self, scale.reshape(sizes), zero_point.reshape(sizes), quant_min, quant_max
    )


def with_out_dtype(op: OpOverload, dtype: torch.dtype, *arguments: Any) -> Tensor:
    """``torch.ops.higher_order.out_dtype``: ``op`` computed in a wide dtype.

    Source: ``torch._higher_order_ops.out_dtype``. A product of int8 stays one, so that what is
    prepared of weights has a byte per element and not four.
    """
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    bytes_only = all(tensor.dtype is torch.int8 for tensor in tensors)
    if op is aten.mm.default and dtype is torch.int32 and bytes_only:
        return _int_mm(*arguments)
    wide = dtype
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    cast = [a.to(wide) if isinstance(a, Tensor) else a for a in arguments]
    result: Tensor = op(*cast).to(dtype)
    return result


def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """``aten::_scaled_mm`` with a scale per tensor, or per row of ``self`` and column of ``mat2``.

    Scales of blocks and of the result are left to the host, and what is wrong to its errors.
    """
    per_tensor = scale_a.numel() == 1 and scale_b.numel() == 1
    sizes = (*scale_a.shape, *scale_b.shape)
    per_row = sizes == (self.shape[0], 1, 1, mat2.shape[1])
    scales_fit = scale_a.dtype is scale_b.dtype is torch.float32 and (per_tensor or per_row)
    are_float8 = all(t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in (self, mat2))
    if scale_result is not None or not (are_float8 and scales_fit):
        return NotImplemented
    if per_tensor:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    result = self.float() @ mat2.float() * scale_a * scale_b
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype or self.dtype)


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten._scaled_mm.default: scaled_mm,
    aten.fake_quantize_per_tensor_affine_cachemask.default: fake_quantize,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: (
        fake_quantize_with_tensors
    ),
    aten.fake_quantize_per_channel_affine_cachemask.default: fake_quantize_channels,
}


def quantize(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int | Tensor,
    quant_max: int | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """``quantize_per_tensor`` with tensors of one element; PyTorch's kernel reads their numbers."""
    level = torch.round(input.float() * (1.0 / _number(scale))) + _number(zero_point)
    return torch.clamp(level, _limit(quant_min), _limit(quant_max)).to(dtype)


def dequantize(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    quant_min: int | Tensor,
    quant_max: int | Tensor,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``dequantize_per_tensor`` with tensors of one element."""
    if input.dtype != dtype:
        raise AssertionError(f"Expecting input to have dtype: {dtype}, but got {input.dtype}")
    wanted = out_dtype or torch.float32
    return (input.to(wanted) - _number(zero_point)).to(wanted) * _number(scale).to(wanted)


def choose_qparams(
    input: Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Scale (float64) and zero point (int64), of one element, of all from the least to the most.

    PyTorch's kernel reads both numbers, which it does not need to: that they are in order is known.
    """
    low, high = _range(input)
    scale = ((high - low) / float(quant_max - quant_min)).clamp(min=eps)
    zero_point = (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
    return scale.reshape(1).double(), zero_point.reshape(1).long()


def choose_qparams_symmetric(
    input: Tensor, quant_min: int, quant_max: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same with the zero point in the middle."""
    low, high = _range(input)
    most = torch.maximum(-low, high)
    scale = (most / (float(quant_max - quant_min) / 2)).clamp(min=eps).reshape(1).double()
    middle = 128 if dtype is torch.uint8 else 0
    return scale, torch.full((1,), middle, dtype=torch.int64, device=input.device)


def _range(input: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most element, and 0."""
    low, high = torch.aminmax(input)
    return low.clamp(max=0), high.clamp(min=0)


def quantize_groups(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    group_size: int = 128,
) -> Tensor:
    """``quantize_per_channel_group``, of (M, N); PyTorch's kernel looks for NaN on the host."""
    groups = input.reshape(-1, min(group_size, input.shape[-1]))
    level = groups * (1.0 / scales.reshape(-1, 1)) + zero_points.reshape(-1, 1)
    return level.round().clamp(quant_min, quant_max).to(dtype).reshape_as(input)


def _number(tensor: Tensor) -> Tensor:
    if tensor.numel() != 1:
        raise AssertionError(f"Expecting one quantization parameter, but got {tensor.numel()}")
    return tensor.reshape(())


def _limit(limit: int | Tensor) -> Any:
    return _number(limit) if isinstance(limit, Tensor) else limit


_RULES: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor.tensor": quantize,
    "quantize_per_tensor.tensor2": quantize,
    "dequantize_per_tensor.tensor": dequantize,
    "dequantize_per_tensor.tensor2": dequantize,
    "choose_qparams.tensor": choose_qparams,
    "choose_qparams_symmetric.tensor": choose_qparams_symmetric,
    "quantize_per_channel_group.default": quantize_groups,
}


def of_integers() -> Iterator[tuple[OpOverload, Callable[..., Any]]]:
    """The operators of ``torch.ops.quantized_decomposed`` that exist by now."""
    for name in (*_COMPOSITE, *_RULES):
        op = _overload(torch.ops.quantized_decomposed, name)
        if op is not None:
            yield op, _RULES.get(name) or partial(op._op_dk, _KEY)


def _overload(namespace: Any, name: str) -> OpOverload | None:
    packet, _, overload = name.partition(".")
    return getattr(getattr(namespace, packet, None), overload, None)
