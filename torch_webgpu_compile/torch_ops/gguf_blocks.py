"""Weights of floats as blocks of GGUF's formats, in groups of 32 elements of a row (`gguf`).

Levels are the nearest ones. Of four bits, scale and minimum of a group are those of least squares
for the levels that its range gives, as in llama.cpp's files.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import gguf

GROUP = 32
"""Elements of a row that share a scale."""

_AT_ONCE = 1 << 20  # elements, which stay in a CPU's cache


def quantized(weight: Tensor, format: str) -> Tensor:
    """A weight in a format.

    Args:
        weight: floats (N, K), on the CPU; K is filled up with zeros to a multiple of a block.
        format: ``Q8_0``: levels of 8 bits and a scale; ``Q4_1`` and ``Q4_K``: of 4 bits, a scale
            and a minimum, in ``Q4_K`` of 6 bits each, in units of 256 elements.

    Returns:
        What `gguf.dequantized` takes: int32 (N, words of a row). Scales are half floats: a group
        without finite ones is not finite, and one of tiny elements is zeros.
    """
    form = gguf.FORMATS[format]
    rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    parts = []
    for part in torch.split(weight.detach(), rows):
        filled = pad(part.float(), (0, form.filled(part.shape[1]) - part.shape[1]))
        groups = filled.reshape(-1, form.block // GROUP, GROUP)
        fields = gguf.packed_fields(_QUANTIZERS[format](groups), form)
        parts.append(gguf.joined(fields, filled.shape[:-1], form, filled.shape[1]))
    return torch.cat(parts)


# Each takes the groups of blocks, (blocks, groups of one, GROUP).


def _q8_0(groups: Tensor) -> gguf.Fields:
    scale = (groups.abs().amax(-1) / 127).half()
    levels = _levels(groups, scale, None, -127, 127).to(torch.int8)
    return gguf.Fields(levels.flatten(1).view(torch.uint8), scale)


def _q4_1(groups: Tensor) -> gguf.Fields:
    scale, minimum = (part.half() for part in _least_squares(groups))
    levels = _levels(groups, scale, minimum, 0, 15).to(torch.uint8)
    return gguf.Fields(levels.flatten(1), torch.cat([scale, minimum], 1))


def _q4_k(groups: Tensor) -> gguf.Fields:
    scale, minimum = _least_squares(groups)
    minimum = (-minimum).clamp_(min=0)  # what is subtracted
    units = torch.stack([scale.amax(1), minimum.amax(1)], 1).div_(63).half()
    unit, unit_of_minimums = units.float()[..., None].unbind(1)
    scales = _levels(scale[..., None], unit, None, 0, 63)[..., 0]
    minimums = _levels(minimum[..., None], unit_of_minimums, None, 0, 63)[..., 0]
    levels = _levels(groups, unit * scales, -unit_of_minimums * minimums, 0, 15)
    return gguf.Fields(
        levels.to(torch.uint8).flatten(1), units, scales.to(torch.int8), minimums.to(torch.int8)
    )


_QUANTIZERS = {"Q8_0": _q8_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def _levels(groups: Tensor, scale: Tensor, minimum: Tensor | None, low: int, high: int) -> Tensor:
    """Floats that are integers in low … high, of which scale · level + minimum is the nearest."""
    scale = scale.float()[..., None]
    moved = groups if minimum is None else groups - minimum.float()[..., None]
    return torch.where(scale == 0, 0, moved / scale).round_().clamp_(low, high)


def _least_squares(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group, (blocks, groups), for 16 levels."""
    minimum = groups.amin(-1).clamp_(max=0)
    scale = (groups.amax(-1) - minimum) / 15
    levels = _levels(groups, scale, minimum, 0, 15)
    level, mean = levels.mean(-1), groups.mean(-1)
    levels -= level[..., None]
    spread = levels.square().sum(-1)
    fitted = (levels * groups).sum(-1) / spread
    scale = torch.where(spread > 0, fitted, scale)
    return scale, mean - scale * level
