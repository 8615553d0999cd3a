"""How the tensors of lists lie in memory: what calls of one sequence (`lists`) compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

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

    __slots__ = ("_description", "_likeness", "number")

    def __init__(
        self, number: int, likeness: storages.Likeness | None, description: Description
    ) -> None:
        self.number = number
        self._likeness = likeness
        self._description = description

    def lies(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors have their shapes and strides still: ``tensor.data = view``."""
        likeness = self._likeness
        return (likeness is not None and likeness.holds(tensors)) or self._description.holds(
            tensors
        )


class Layouts:
    """Where tensors were, and how they lay there, when a sequence met them.

    By the time that it runs, ``tensor.data = other`` or ``tensor.t_()`` may have changed that.
    """

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._memory: list[storages.Memory] = []
        self._parts: list[tuple[Description, storages.Likeness | None]] = []

    def add(
        self,
        description: Description,
        addresses: Sequence[int],
        likeness: storages.Likeness | None,
    ) -> None:
        """Remembers tensors; ``likeness`` holds for tensors of this description."""
        self._addresses += addresses
        self._memory += storages.memory_at(addresses)
        self._parts.append((description, likeness))

    def restored(self, tensors: list[Tensor], index: int) -> list[Tensor]:
        """Those tensors as they were, on a device."""
        if list(map(data_ptr, tensors)) == self._addresses[: len(tensors)] and self._lie(tensors):
            return tensors
        # The last tensors may be missing: a call that was refused had added them.
        descriptions = [description for description, _ in self._parts]
        dtypes, shapes, strides = (
            list(chain.from_iterable(map(attrgetter(name), descriptions)))
            for name in ("dtypes", "shapes", "strides")
        )
        made = []
        for k, tensor in enumerate(tensors):
            layout = self._addresses[k], shapes[k], strides[k]
            if layout != (data_ptr(tensor), tensor.shape, tensor.stride()):
                tensor = storages.tensor_at(self._memory[k], dtypes[k], *layout, index)
            made.append(tensor)
        return made

    def _lie(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors have their shapes and strides still."""
        start = 0
        for description, likeness in self._parts:
            if start >= len(tensors):  # what follows is of a call that was refused
                break
            part = tensors[start : start + len(description.shapes)]
            start += len(part)
            if not (likeness is not None and likeness.holds(part)) and not description.holds(part):
                return False
        return True
