"""Fourier transforms of complex tensors, by ``webgpu::fft``, ``rfft`` and ``irfft``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...torch_ops import fft as _fft  # noqa: F401  defines the operators
from .pair import Pair, as_pair, join, separate
from .registry import Call, rule

aten = torch.ops.aten
webgpu = torch.ops.webgpu

_NONE, _BY_ROOT, _BY_LENGTH = 0, 1, 2  # ATen: ``fft_norm_mode``


def _scale(normalization: int, lengths: Sequence[Any]) -> float:
    """The factor of a transform of these lengths, which are made constants."""
    numel = math.prod(int(length) for length in lengths)
    if normalization == _NONE or numel == 0:
        return 1.0
    return 1 / math.sqrt(numel) if normalization == _BY_ROOT else 1 / numel


@rule(aten._fft_c2c.default)
def _c2c(call: Call, self: Pair, dim: Sequence[int], normalization: int, forward: bool) -> Pair:
    scale = _scale(normalization, [self.shape[d] for d in dim])
    return separate(webgpu.fft(join(self), dim, forward, scale))


@rule(aten._fft_r2c.default)
def _r2c(call: Call, self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Pair:
    scale = _scale(normalization, [self.shape[d] for d in dim])
    if onesided:
        return separate(webgpu.rfft(self, dim, scale))
    return separate(webgpu.fft(join(as_pair(self, call.dtype)), dim, True, scale))


@rule(aten._fft_c2r.default)
def _c2r(
    call: Call, self: Pair, dim: Sequence[int], normalization: int, last_dim_size: Any
) -> Tensor:
    lengths = [*(self.shape[d] for d in dim[:-1]), last_dim_size]
    made: Tensor = webgpu.irfft(join(self), dim, last_dim_size, _scale(normalization, lengths))
    return made
