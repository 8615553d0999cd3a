"""How the tensors of lists lie in memory: what calls of one sequence (`lists`) compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from ...runtime.buffers import AnyBuffer
from ..tensors import storages
from ..tensors.storages import data_ptr

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape = Tensor.shape.__get__  # type: ignore[attr-defined]
_stride = torch._C.TensorBase.stride

EXACT = {torch.float32, torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64}


class Description:
    """What matters to the compiler of tensors, but for their alignment.

    Equal ones are one object: in the key of a call it stands for hundreds.

    Attributes:
        is_exact: whether kernels compute in all of the dtypes as operators do: without rounding
            what they do not store.
    """

    __slots__ = ("dtypes", "is_exact", "shapes", "strides")

    def __init__(
        self,
        dtypes: tuple[torch.dtype, ...],
        shapes: tuple[torch.Size, ...],
        strides: tuple[tuple[int, ...], ...],
    ) -> None:
        self.dtypes = dtypes
        self.shapes = shapes
        self.strides = strides
        self.is_exact = EXACT.issuperset(dtypes)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Description:
        """What tensors are now."""
        of_each = (tuple(map(get, tensors)) for get in (_dtype, _shape, _stride))
        return cls(*of_each)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors of these dtypes lie so."""
        return (
            tuple(map(_shape, tensors)) == self.shapes
            and tuple(map(_stride, tensors)) == self.strides
        )


class KnownList:
    """A list of tensors that a sequence has met.

    Attributes:
        number: of the list in the sequence.
    """

    __slots__ = ("_addresses", "_description", "_likeness", "number")

    def __init__(
        self,
        number: int,
        addresses: Sequence[int],
        likeness: storages.Likeness | None,
        description: Description,
    ) -> None:
        self.number = number
        self._addresses = addresses
        self._likeness = likeness
        self._description = description

    def lies(self, tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        """Whether the tensors are where they were, with their shapes and strides.

        After ``tensor.data = other`` one of them is not.
        """
        likeness = self._likeness
        return addresses == self._addresses and (
            (likeness is not None and likeness.holds(tensors)) or self._description.holds(tensors)
        )


class Layouts:
    """Where tensors were, and how they lay there, when a sequence met them.

    By the time that it runs, ``tensor.data = other`` or ``tensor.t_()`` may have changed that.

    Attributes:
        addresses: of the tensors.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self._memory: list[storages.Memory] = []
        self._descriptions: list[Description] = []

    def add(self, description: Description, addresses: Sequence[int]) -> None:
        """Remembers tensors of this description."""
        self.addresses += addresses
        self._memory += storages.memory_at(addresses)
        self._descriptions.append(description)

    def buffers(self, count: int) -> list[AnyBuffer | None]:
        """The memory of the first ``count`` tensors.

        The last tensors may be missing: a call that was refused had added them.
        """
        return storages.buffers_in(self._memory[:count], self.addresses[:count])

    def restored(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """Those tensors as they were, on a device."""
        dtypes, shapes, strides = (
            list(chain.from_iterable(map(attrgetter(name), self._descriptions)))
            for name in ("dtypes", "shapes", "strides")
        )
        made = []
        for k, tensor in enumerate(tensors):
            layout = self.addresses[k], shapes[k], strides[k]
            if layout != (data_ptr(tensor), tensor.shape, tensor.stride()):
                tensor = storages.tensor_at(self._memory[k], dtypes[k], *layout, index)
            made.append(tensor)
        return made
