"""What a forward graph of CPU tensors keeps on the GPU for its backward graph.

AOTAutograd gets tensors of the right shape whose contents are never written; a `Resident` on such a
tensor is its value. Whoever else reads the tensor has to `fill` it before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..counters import counters
from ..runtime.device import Device, GpuBuffer
from ..symbolic.sizes import storage_span

_NAME = "_webgpu_resident"


@dataclass(frozen=True, slots=True)
class Resident:
    """The contents, on a GPU, of a tensor; ``strides`` in elements."""

    device: Device
    buffer: GpuBuffer
    strides: tuple[int, ...]


def keep(tensor: Tensor, resident: Resident) -> None:
    """Says that a tensor's contents are on the GPU."""
    setattr(tensor, _NAME, resident)


def of(value: Any) -> Resident | None:
    """The contents of a tensor that are on the GPU; None for any other value."""
    found: Resident | None = getattr(value, _NAME, None)
    return found


def fill(values: Iterable[Any]) -> None:
    """Gives the tensors among values whose contents are on a GPU their contents on the CPU.

    Raises:
        DeviceLostError: that GPU was lost with them.
    """
    for value in values:
        resident = of(value)
        if resident is None:
            continue
        device = resident.device
        if device.is_lost:
            raise device.lost_error(
                "what the forward pass kept for its backward pass was on the GPU; run the forward "
                "pass again"
            )
        nbytes = storage_span(value.shape, value.stride()) * value.element_size()
        device.download_many([(resident.buffer, 0, nbytes, value.data_ptr())])
        counters.add(bytes_downloaded=nbytes)
        delattr(value, _NAME)
