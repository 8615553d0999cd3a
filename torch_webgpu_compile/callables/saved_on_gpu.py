"""Activations of CPU tensors that a forward graph saves on the GPU for its backward graph.

AOTAutograd gets tensors of the right shape whose contents are never written; a `SavedOnGpu` on such
a tensor is its value. Whoever else reads the tensor has to `fill` it before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..counters import counters
from ..runtime.device import Device, GpuBuffer
from ..symbolic.sizes import storage_span

_NAME = "_webgpu_saved_on_gpu"


@dataclass(frozen=True, slots=True)
class SavedOnGpu:
    """A tensor's contents in a buffer on a GPU; ``strides`` in elements."""

    device: Device
    buffer: GpuBuffer
    strides: tuple[int, ...]


def keep(tensor: Tensor, saved: SavedOnGpu) -> None:
    """Says that a tensor's contents are on the GPU."""
    setattr(tensor, _NAME, saved)


def of(value: Any) -> SavedOnGpu | None:
    """The contents of a tensor that are on the GPU; None for any other value."""
    found: SavedOnGpu | None = getattr(value, _NAME, None)
    return found


def fill(values: Iterable[Any]) -> None:
    """Gives the tensors among values whose contents are on a GPU their contents on the CPU.

    Raises:
        DeviceLostError: that GPU was lost with them.
    """
    for value in values:
        saved = of(value)
        if saved is None:
            continue
        device = saved.device
        if device.is_lost:
            raise device.lost_error(
                "what the forward pass kept for its backward pass was on the GPU; run the forward "
                "pass again"
            )
        nbytes = storage_span(value.shape, value.stride()) * value.element_size()
        device.download_many([(saved.buffer, 0, nbytes, value.data_ptr())])
        counters.add(bytes_downloaded=nbytes)
        delattr(value, _NAME)
