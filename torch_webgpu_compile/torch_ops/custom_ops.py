"""Operators that this package adds to PyTorch, for capture to use and lowering to know.

``webgpu::seed`` and ``webgpu::uniform`` are random numbers that a kernel can compute: ``uniform``
is a pure function of a seed. ``webgpu::self_attention`` is ``_native_multi_head_attention`` of one
tensor: what is known of an eager call does not say that three arguments are the same one.
Attention is in ``attention_ops``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_private import OpOverload


@torch.library.custom_op("webgpu::seed", mutates_args=(), schema="(int stream) -> Tensor")
def seed(stream: int) -> Tensor:
    """Two int32 from PyTorch's default generator. ``stream`` tells equal calls apart."""
    return torch.empty(2, dtype=torch.int32).random_()


@seed.register_fake
def _(stream: int) -> Tensor:
    return torch.empty(2, dtype=torch.int32)


WEYL = 0x9E3779B9
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))


@torch.library.custom_op(
    "webgpu::uniform",
    mutates_args=(),
    schema="(Tensor seed, SymInt[] size, Device? device=None) -> Tensor",
)
def uniform(seed: Tensor, size: Sequence[int], device: torch.device | None = None) -> Tensor:
    """float32 in [0, 1) on a device, multiples of 2⁻²⁴, from an int32 seed of two elements.

    Element i is a hash of (i, seed): twice "lowbias32" (Chris Wellons, "Prospecting for Hash
    Functions", 2018), on a Weyl sequence from the seed's first half, and on the second half.
    """
    numel = 1
    for length in size:
        numel *= length
    mask = 0xFFFFFFFF
    first, second = (seed.to(torch.int64) & mask).unbind()
    x = (torch.arange(numel) * WEYL + first) & mask
    x = _hash(x, mask)
    x = _hash(x ^ second, mask)
    numbers = ((x >> 8).float() * 2.0**-24).reshape(tuple(size))
    return numbers if device is None else numbers.to(device)


def _hash(x: Tensor, mask: int) -> Tensor:
    for shift, factor in ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & mask
    return x ^ (x >> 16)


@uniform.register_fake
def _(seed: Tensor, size: Sequence[int], device: torch.device | None = None) -> Tensor:
    return torch.empty(tuple(size), dtype=torch.float32, device=device)


torch.library.define(
    "webgpu::self_attention",
    "(Tensor query, int embed_dim, int num_head, Tensor qkv_weight, Tensor qkv_bias, "
    "Tensor proj_weight, Tensor proj_bias, Tensor? mask=None, bool need_weights=True, "
    "bool average_attn_weights=True, int? mask_type=None) -> (Tensor, Tensor)",
)
self_attention: OpOverload = torch.ops.webgpu.self_attention.default
