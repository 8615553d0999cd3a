"""Results of the calls of a sequence (`lists`) before it has run: tensors without memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError
from ...runtime.buffers import EmptiedBuffer
from ...symbolic.sizes import storage_span
from ...tensors import storages
from ...torch_private import _storage_Use_Count, _use_count
from .list_layouts import Description, KnownList

_none_yet = EmptiedBuffer(
    lambda: DeviceError(
        "a webgpu tensor has no contents, as the operators failed that were to compute it (see the "
        "error before this one): compute it again"
    )
)


class Results:
    """The results of a call.

    Args:
        layouts: (dtype, sizes, strides) of each.
        index: of the device.
        earlier: the list of the results of an earlier call like this; None: these are the first.

    Attributes:
        tensors: the results.
        known: them as a list.
    """

    __slots__ = ("_storages", "known", "tensors")

    def __init__(
        self, layouts: Sequence[tuple[Any, ...]], index: int, earlier: KnownList | None = None
    ) -> None:
        self.tensors = [without_memory(layout, index) for layout in layouts]
        self._storages = [tensor.untyped_storage()._cdata for tensor in self.tensors]
        addresses = storages.addresses_of(self.tensors)
        earlier = earlier or KnownList(
            addresses, Description.of(self.tensors), storages.Likeness(self.tensors)
        )
        self.known = KnownList(addresses, earlier.description, earlier.likeness)

    def are_needed(self) -> list[bool]:
        """For each result, whether it, or a view of it, is referenced elsewhere."""
        references, uses = map(sys.getrefcount, self.tensors), map(_use_count, self.tensors)
        views = map(_storage_Use_Count, self._storages)
        found = zip(references, uses, views, strict=True)
        return [r > _REFERENCES or u > _USES or v > _VIEWS for r, u, v in found]

    def lie_as_made(self) -> bool:
        """Whether the tensors are where they were made: not after ``tensor.data = other``."""
        return storages.addresses_of(self.tensors) == self.known.addresses


def _counts() -> tuple[int, int, int]:
    """Reference counts of a tensor that only a list refers to."""
    tensors = [torch.empty(0)]
    handle = tensors[0].untyped_storage()._cdata
    references, uses = (next(map(count, tensors)) for count in (sys.getrefcount, _use_count))
    return references, uses, _storage_Use_Count(handle)


_REFERENCES, _USES, _VIEWS = _counts()


def without_memory(layout: tuple[Any, ...], index: int) -> Tensor:
    """A tensor of (dtype, sizes, strides) that `give` will give its memory."""
    dtype, sizes, strides = layout
    nbytes = storage_span(sizes, strides) * dtype.itemsize
    storage = storages.new_storage(nbytes, index, _none_yet)
    return storages.new_tensor(storage, dtype, sizes, strides, 0, index)


def give(tensor: Tensor, result: Tensor | None) -> None:
    """Gives a tensor without memory that of a result; nothing to an empty one."""
    if result is not None and result.numel():
        storages.fill(tensor, storages.buffer_of(result))
