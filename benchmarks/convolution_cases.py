"""The 53 convolutions of ResNet-50, without anything between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernel_cases import Case
from .peer_variants import memory_formats


class Layer(NamedTuple):
    """A convolution: channels in and out, side of the kernel, stride, side of the image."""

    channels: int
    filters: int
    kernel: int
    stride: int
    side: int

    @property
    def output_side(self) -> int:
        return -(-self.side // self.stride)

    @property
    def flops_per_image(self) -> int:
        products = self.channels * self.kernel**2 * self.filters
        return 2 * products * self.output_side**2


def layers(image: int = 224) -> list[Layer]:
    """In the order of the network (He et al., arXiv:1512.03385, table 1; stride in the 3×3)."""
    found = [Layer(3, 64, 7, 2, image)]
    side, channels = image // 4, 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for index in range(count):
            stride = 2 if stage and not index else 1
            if not index:
                found.append(Layer(channels, 4 * width, 1, stride, side))
            found.append(Layer(channels, width, 1, 1, side))
            found.append(Layer(width, width, 3, stride, side))
            side //= stride
            found.append(Layer(width, 4 * width, 1, 1, side))
            channels = 4 * width
    return found


def _case(batch: int) -> Case:
    def sizes(small: bool) -> tuple[int, list[Layer]]:
        return (1, layers(32)) if small else (batch, layers())

    def build(small: bool) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
        count, todo = sizes(small)
        shapes = sorted({(layer.channels, layer.side) for layer in todo})
        images = [torch.randn(count, channels, side, side) for channels, side in shapes]
        # Filters of unit gain: outputs keep the scale of the inputs.
        filters = [
            torch.randn(f, c, k, k) / math.sqrt(c * k * k) for c, f, k, _stride, _side in todo
        ]

        def function(*inputs: Tensor) -> list[Tensor]:
            x, weights = inputs[: len(shapes)], inputs[len(shapes) :]
            return [
                F.conv2d(
                    x[shapes.index((layer.channels, layer.side))],
                    weight,
                    stride=layer.stride,
                    padding=layer.kernel // 2,
                )
                for layer, weight in zip(todo, weights, strict=True)
            ]

        return function, (*images, *filters)

    def flops(small: bool) -> int:
        count, todo = sizes(small)
        return count * sum(layer.flops_per_image for layer in todo)

    name = f"convolutions_{batch}"
    return Case(name, build, flops=flops, goal="≥ 0.8 × cuDNN in total", variants=memory_formats)


def cases() -> Iterator[Case]:
    """One per batch size."""
    yield from (_case(batch) for batch in (8, 32))
