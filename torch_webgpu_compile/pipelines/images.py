"""What an image processor of transformers does with one picture, as a function of tensors.

Pictures are resized as Pillow and torchvision do it: the filter is as wide as a source pixel or a
target pixel, whichever is larger, along rows first, and each pass ends in whole levels of 0 to 255.
(Pillow 13 goes along columns first where it makes a picture wider and lower, which of noise may be
some levels.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import UnsupportedOp

MOST_PIXELS = 4096  # of a side


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


_FILTERS: dict[int, tuple[int, Callable[[Tensor], Tensor]]] = {2: (1, _triangle), 3: (2, _cubic)}
"""By Pillow's number of a filter: half of its width, and its values."""


@dataclass(frozen=True)
class ImageSteps:
    """The steps of a processor.

    Attributes:
        height, width: of the result, which is the middle of what was resized.
        sizes: what the picture is resized to: both sides, or the shorter one, and the other in
            proportion.
        resample: a filter, by Pillow's number.
        scale: what levels of 0 to 255 are multiplied with.
        mean, std: of the channels, which are normalized with them.
    """

    height: int
    width: int
    sizes: tuple[int, int] | int
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Tensor) -> Tensor:
        """What the model is given: uint8 (height, width, 4) → float32 (1, 3, height, width)."""
        old = image.shape[:2]
        new: Sequence[Any]
        if isinstance(self.sizes, int):
            least: Any = torch.sym_min(*old)  # type: ignore[no-untyped-call]
            new = [self.sizes * size // least for size in old]
        else:
            new = self.sizes
        pixels = image[..., :3].to(torch.float32)
        for axis in (1, 0):
            count = (self.height, self.width)[axis]
            first = (new[axis] - count) // 2
            pixels = _resized(pixels, axis, new[axis], first, count, self.resample)
        mean, std = (torch.tensor(of, device=image.device) for of in (self.mean, self.std))
        return ((pixels * self.scale - mean) / std).permute(2, 0, 1)[None]


def _resized(image: Tensor, axis: int, size: Any, first: Any, count: int, resample: int) -> Tensor:
    """``count`` pixels from ``first`` on of an axis that is resized to ``size``.

    Args:
        image: float32 (height, width, channels), of whole levels.
    """
    half, weigh = _FILTERS[resample]
    old = image.shape[axis]
    wider: Any = torch.sym_max(old, size)  # type: ignore[no-untyped-call]
    taps = 2 * half * ((wider + size - 1) // size) + 1
    center: Tensor = (2 * (torch.arange(count, device=image.device) + first) + 1) * old / (2 * size)
    stretch = wider / size  # of the filter: pixels of the source
    begin = (center - half * stretch + 0.5).clamp(min=0).long()
    end = (center + half * stretch + 0.5).long().clamp(max=old)
    at = begin[:, None] + torch.arange(taps, device=image.device)
    weights = weigh((at + 0.5 - center[:, None]) / stretch) * (at < end[:, None])
    weights = weights / weights.sum(1, keepdim=True)
    at = at.clamp(max=old - 1)
    levels: Tensor
    if axis == 0:
        levels = (weights[:, :, None, None] * image[at]).sum(1)
    else:
        levels = (weights[None, :, :, None] * image[:, at]).sum(2)
    return (levels + 0.5).floor().clamp(0, 255)


def image_steps(processor: Any) -> ImageSteps:
    """What a processor does.

    Raises:
        UnsupportedOp: it does something else, as far as its settings or its result show.
    """
    steps = _steps(processor)
    for shape in ((97, 131), (310, 201)):
        picture = _waves(*shape)
        wanted = processor(images=[picture], return_tensors="pt")["pixel_values"]
        found = steps(torch.tensor(numpy.concatenate([picture, picture[..., :1]], axis=-1)))
        level = steps.scale / min(steps.std)
        if found.shape != wanted.shape or not (found - wanted).abs().max() <= 3 * level:
            raise _refusal(processor, "it makes something else of a picture than its settings say")
    return steps


def _waves(height: int, width: int) -> Any:
    """A picture without noise: uint8 (height, width, 3)."""
    rows, columns, channels = numpy.mgrid[:height, :width, :3]
    waves = numpy.sin(rows / 5 + channels) + numpy.cos(columns / 7 - channels)
    return (127.5 + 60 * waves).astype(numpy.uint8)


def _steps(processor: Any) -> ImageSteps:
    if not processor.do_resize:
        raise _refusal(processor, "do_resize is off, and the model takes one size")
    size = dict(processor.size)
    crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", False) else None
    sizes: tuple[int, int] | int
    if "shortest_edge" in size:
        sizes = int(size["shortest_edge"])
        part = getattr(processor, "crop_pct", None)
        if part is not None:  # as of ConvNeXt: the middle of a small result
            crop = {"height": sizes, "width": sizes}
            sizes = int(sizes / part) if sizes < 384 else (sizes, sizes)
    elif {"height", "width"} <= size.keys():
        sizes = int(size["height"]), int(size["width"])
        crop = crop or size
    else:
        raise _refusal(processor, f"size={size} is not height and width, or shortest_edge")
    if crop is None:
        raise _refusal(processor, f"size={size} leaves the other side open")
    least = (sizes, sizes) if isinstance(sizes, int) else sizes
    height, width = int(crop["height"]), int(crop["width"])
    if height > least[0] or width > least[1]:
        raise _refusal(processor, f"crop_size={crop} is larger than size={size}")
    resample = int(processor.resample)
    if resample not in _FILTERS:
        raise _refusal(processor, f"resample={resample} is neither bilinear (2) nor bicubic (3)")
    scale = float(processor.rescale_factor) if processor.do_rescale else 1.0
    mean, std = (0.0,) * 3, (1.0,) * 3
    if processor.do_normalize:
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return ImageSteps(height, width, sizes, resample, scale, mean, std)


def _refusal(processor: Any, reason: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"export_pipeline with {type(processor).__name__}",
        reason,
        "export the model alone, and give it what the processor makes",
    )
