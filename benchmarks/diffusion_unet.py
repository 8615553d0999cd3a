"""The denoising network of a latent diffusion model (Rombach et al., arXiv:2112.10752), at the size
that fits 64×64 latents: residual blocks, and transformers that read a text, on three scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HEAD = 64
_GROUPS = 8


class _Residual(nn.Module):
    """Two convolutions; the time is added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(_GROUPS, n) for n in (inputs, outputs))
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.norms[0](x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = self.skip(x) + self.second(F.silu(self.norms[1](hidden)))
        return result


class _Attention(nn.Module):
    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(features, features, bias=False)
        self.key_value = nn.Linear(context, 2 * features, bias=False)
        self.out = nn.Linear(features, features)
        self.heads = max(1, features // _HEAD)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        projected = self.query(x), *self.key_value(context).chunk(2, -1)
        heads = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        mixed = F.scaled_dot_product_attention(*heads)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _Transformer(nn.Module):
    """Over the pixels: among themselves, and to the text."""

    def __init__(self, features: int, context: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(_GROUPS, features)
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(3))
        self.to_pixels = _Attention(features, features)
        self.to_text = _Attention(features, context)
        self.gated = nn.Linear(features, 8 * features)
        self.out = nn.Linear(4 * features, features)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        pixels = self.group_norm(x).flatten(2).mT
        y = self.norms[0](pixels)
        pixels = pixels + self.to_pixels(y, y)
        pixels = pixels + self.to_text(self.norms[1](pixels), text)
        value, gate = self.gated(self.norms[2](pixels)).chunk(2, -1)
        pixels = pixels + self.out(value * F.gelu(gate))
        return x + pixels.mT.reshape(x.shape)


class _Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int, context: int | None) -> None:
        super().__init__()
        self.residual = _Residual(inputs, outputs, time)
        self.transformer = None if context is None else _Transformer(outputs, context)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.transformer is None else self.transformer(x, text)


class DiffusionUNet(nn.Module):
    """(latents, time, text) → the noise.

    Args:
        channels: of the latents.
        widths: features on each scale, of which each is half as large as the one before; all but
            the first have transformers.
        stages: on each scale, on the way down and on the way up.
        context: features of the text.

    Shapes: latents (N, channels, H, W), time (N,), text (N, L, context); like the latents.
    """

    def __init__(
        self,
        channels: int = 4,
        widths: Sequence[int] = (128, 256, 512),
        stages: int = 2,
        context: int = 768,
    ) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.width = widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.up, self.samplers = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        skipped: list[int] = []
        width = widths[0]
        for scale, features in enumerate(widths):
            for _ in range(stages):
                self.down.append(_Stage(width, features, time, context if scale else None))
                width = features
                skipped.append(width)
            if scale < len(widths) - 1:
                self.samplers.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
        self.middle = _Stage(width, width, time, context)
        for scale, features in reversed(list(enumerate(widths))):
            for _ in range(stages):
                has_text = context if scale else None
                self.up.append(_Stage(width + skipped.pop(), features, time, has_text))
                width = features
            if scale:
                self.samplers.append(nn.Conv2d(width, width, 3, padding=1))
        self.stages = stages
        self.norm = nn.GroupNorm(_GROUPS, width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor) -> Tensor:
        embedded = self.time(self._waves(time))
        x = self.first(latents)
        skipped: list[Tensor] = []
        samplers = iter(self.samplers)
        scales = len(self.down) // self.stages
        for scale, stages in enumerate(_scales(self.down, self.stages)):
            for stage in stages:
                x = stage(x, embedded, text)
                skipped.append(x)
            if scale < scales - 1:
                x = next(samplers)(x)
        x = self.middle(x, embedded, text)
        for scale, stages in enumerate(_scales(self.up, self.stages)):
            for stage in stages:
                x = stage(torch.cat((x, skipped.pop()), 1), embedded, text)
            if scale < scales - 1:
                x = next(samplers)(F.interpolate(x, scale_factor=2.0))
        result: Tensor = self.last(F.silu(self.norm(x)))
        return result

    def _waves(self, time: Tensor) -> Tensor:
        half = self.width // 2
        places = torch.arange(half, device=time.device, dtype=torch.float32)
        angles = time[:, None] * torch.exp(places * (-math.log(10_000) / half))
        return torch.cat((angles.cos(), angles.sin()), 1)


def _scales(stages: nn.ModuleList, count: int) -> Iterator[Sequence[nn.Module]]:
    listed = list(stages)
    for start in range(0, len(listed), count):
        yield listed[start : start + count]
