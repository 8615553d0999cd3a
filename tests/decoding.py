"""Layers of a decoder that computes one token over caches, which it changes in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Of a decoder; ``heads`` are grouped over ``kv_heads``."""

    heads: int = 6
    kv_heads: int = 2
    head: int = 16
    hidden: int = 64
    inner: int = 96
    positions: int = 200
    layers: int = 2
    batch: int = 1


@dataclass(frozen=True)
class Layer:
    """Weights, and the caches: batch × kv_heads × positions × head."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_bias: Tensor
    out: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    keys: Tensor
    values: Tensor


def layers_of(sizes: Sizes, dtype: torch.dtype = torch.float32) -> list[Layer]:
    """Random weights and caches, on the CPU."""

    def weight(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) / columns**0.5).to(dtype)

    def layer() -> Layer:
        cache = sizes.batch, sizes.kv_heads, sizes.positions, sizes.head
        queries, own = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        return Layer(
            weight(queries, sizes.hidden),
            weight(own, sizes.hidden),
            weight(own, sizes.hidden),
            torch.randn(own).to(dtype),
            weight(sizes.hidden, queries),
            weight(sizes.inner, sizes.hidden),
            weight(sizes.inner, sizes.hidden),
            weight(sizes.hidden, sizes.inner),
            torch.rand(sizes.hidden).to(dtype),
            torch.randn(cache).to(dtype),
            torch.randn(cache).to(dtype),
        )

    return [layer() for _ in range(sizes.layers)]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def decode(sizes: Sizes, x: Tensor, position: Tensor, layers: list[Layer]) -> Tensor:
    """The hidden state after all layers, of x: batch × 1 × hidden at one position (of shape 1)."""
    batch, head = x.shape[0], sizes.head
    frequency = 10000.0 ** (-torch.arange(0, head, 2, device=x.device) / head)
    angle = torch.cat([position * frequency] * 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    mask = torch.arange(sizes.positions, device=x.device)[None] <= position
    groups = sizes.heads // sizes.kv_heads
    for layer in layers:
        y = rms_norm(x, layer.norm)
        q = F.linear(y, layer.q).view(batch, 1, sizes.heads, head).transpose(1, 2)
        k = F.linear(y, layer.k, layer.k_bias).view(batch, 1, sizes.kv_heads, head).transpose(1, 2)
        v = F.linear(y, layer.v).view(batch, 1, sizes.kv_heads, head).transpose(1, 2)
        layer.keys.index_copy_(2, position, rotated(k, cos, sin))
        layer.values.index_copy_(2, position, v)
        attended = F.scaled_dot_product_attention(
            rotated(q, cos, sin),
            layer.keys.repeat_interleave(groups, 1),
            layer.values.repeat_interleave(groups, 1),
            attn_mask=mask,
        )
        x = x + F.linear(attended.transpose(1, 2).reshape(batch, 1, -1), layer.out)
        y = rms_norm(x, layer.norm)
        x = x + F.linear(F.silu(F.linear(y, layer.gate)) * F.linear(y, layer.up), layer.down)
    return x
