"""Interpolation with antialiasing as two products with matrices of weights. Source: ATen UpSample.

An output element is the mean of inputs under a filter as wide as the output's pitch; the weights of
a dimension are a matrix (output size, input size) that is made where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_CUBIC = -0.5  # Pillow's coefficient, not that of PyTorch's other bicubic kernels


def _linear(x: Tensor) -> Tensor:
    return (1 - x).clamp_min(0)


def _cubic(x: Tensor) -> Tensor:
    a = _CUBIC
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


_FILTERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bilinear": (_linear, 2),
    "bicubic": (_cubic, 4),
}


def _weights(
    kind: str, size_in: int, size_out: int, align: bool, factor: float | None, like: Tensor
) -> Tensor:
    """The weights (size_out, size_in) of one dimension, in the dtype that PyTorch computes in."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if align:
        scale = (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
    else:
        scale = 1.0 / factor if factor is not None and factor > 0 else size_in / size_out
    filter_of, taps = _FILTERS[kind]
    support = taps * 0.5 * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    centre = (torch.arange(size_out, dtype=dtype, device=like.device) + 0.5).unsqueeze(1) * scale
    first = (centre - support + 0.5).to(torch.int32).clamp_min(0)
    last = (centre + support + 0.5).to(torch.int32).clamp_max(size_in)
    place = torch.arange(size_in, dtype=torch.int32, device=like.device)
    distance = (place.to(dtype) - centre + 0.5) * inverse
    weights = torch.where((place >= first) & (place < last), filter_of(distance.abs()), 0.0)
    return weights / weights.sum(1, keepdim=True)


def _both(
    kind: str,
    sizes_in: Sequence[int],
    sizes_out: Sequence[int],
    align: bool,
    factors: Sequence[float | None],
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    rows, columns = (
        _weights(kind, i, o, align, f, like)
        for i, o, f in zip(sizes_in, sizes_out, factors, strict=True)
    )
    return rows, columns


def _rules(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(
        self: Tensor,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        if not self.is_floating_point() or 0 in self.shape:
            return NotImplemented
        scales = scales_h, scales_w
        rows, columns = _both(kind, self.shape[2:], output_size, align_corners, scales, self)
        return (rows @ (self.to(rows.dtype) @ columns.mT)).to(self.dtype)

    def backward(
        grad_output: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        if 0 in grad_output.shape:
            return NotImplemented
        scales = scales_h, scales_w
        rows, columns = _both(kind, input_size[2:], output_size, align_corners, scales, grad_output)
        return (rows.mT @ (grad_output.to(rows.dtype) @ columns)).to(grad_output.dtype)

    return forward, backward


DECOMPOSITIONS: dict[Any, Any] = {}
for _kind in _FILTERS:
    _forward, _backward = _rules(_kind)
    DECOMPOSITIONS[getattr(aten, f"_upsample_{_kind}2d_aa").default] = _forward
    DECOMPOSITIONS[getattr(aten, f"_upsample_{_kind}2d_aa_backward").default] = _backward
