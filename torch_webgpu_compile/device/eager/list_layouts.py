"""Layouts of the tensors in lists, by which calls of one sequence (`lists`) are compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import invert

import torch
from torch import Tensor

from ...runtime.buffers import AnyBuffer
from ...tensors import storages
from ...torch_private import TensorBase

_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape = Tensor.shape.__get__  # type: ignore[attr-defined]
_stride = TensorBase.stride

EXACT = {torch.float32, torch.float64, torch.bool, torch.uint8, torch.int32, torch.int64}


class Description:
    """The properties of tensors that the compiler depends on, but for their alignment.

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
        """The description of tensors: one object for equal ones."""
        content = tuple(tuple(map(get, tensors)) for get in (_dtype, _shape, _stride))
        found = _descriptions.get(content)
        if found is None:
            if len(_descriptions) >= _MOST_DESCRIPTIONS:
                _descriptions.clear()
            found = _descriptions[content] = cls(*content)
        return found

    def of_each(self) -> zip[tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
        """(dtype, shape, strides) of each tensor."""
        return zip(self.dtypes, self.shapes, self.strides, strict=True)


_MOST_DESCRIPTIONS = 1 << 14
_descriptions: dict[tuple[tuple[object, ...], ...], Description] = {}


class KnownList:
    """A list of tensors that a sequence has met.

    Tensors are told by their addresses: others that lie there as these do are as good.

    Args:
        addresses: of the tensors, see `storages.addresses_of`.
        description: of them.
        likeness: the same for all that lie so; None: there is none yet.
        before: the list that the sequence met first before this one; None: this is the first.

    Attributes:
        slots: of their storages.
        residues: bytes of each address beyond a multiple of the binding alignment; 0 if there are
            none.
    """

    __slots__ = (
        *("addresses", "before", "description", "has_offsets", "likeness"),
        *("residues", "slots"),
    )

    def __init__(
        self,
        addresses: tuple[int, ...],
        description: Description,
        likeness: storages.Likeness | None = None,
        before: KnownList | None = None,
    ) -> None:
        self.addresses = addresses
        self.description = description
        self.likeness = likeness
        self.before = before
        self.slots = storages.slots_of(addresses)
        self.residues, self.has_offsets = storages.residues_of(addresses)


class Layouts:
    """Addresses and layouts of tensors when a sequence met them.

    By the time that it runs, ``tensor.data = other`` or ``tensor.t_()`` may have changed that.

    Attributes:
        addresses: of the tensors.
    """

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self._memory: list[storages.Memory] = []
        self._lists: list[KnownList] = []
        self._has_offsets = False

    def add(self, found: KnownList) -> None:
        """Remembers the tensors of a list."""
        self.addresses += found.addresses
        self._memory += storages.memory_in(found.slots)
        self._lists.append(found)
        self._has_offsets |= found.has_offsets

    def buffers(self, count: int) -> list[AnyBuffer | None]:
        """The memory of the first ``count`` tensors.

        The last tensors may be missing: a call that was refused had added them.
        """
        return storages.buffers_in(
            self._memory[:count], self.addresses[:count] if self._has_offsets else ()
        )

    def restored(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        """The tensors as they were, on a device."""
        made = []
        now = storages.addresses_of(tensors)
        layouts = chain.from_iterable(found.description.of_each() for found in self._lists)
        for k, (tensor, layout) in enumerate(zip(tensors, layouts, strict=False)):
            address = self.addresses[k]
            if (address, *layout[1:]) != (now[k], tensor.shape, tensor.stride()):
                dtype, shape, strides = layout
                memory = self._memory[k]
                tensor = storages.tensor_at(memory, dtype, address, shape, strides, index)
            made.append(tensor)
        return made


class Places:
    """Places of a sequence's tensors: positions of its arguments, or ~position of its results."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._slots: set[int] = set()
        self._counts = [0, 0]

    def find(self, arguments: Sequence[int], made: Sequence[int]) -> None:
        """Takes the addresses that have been added to these since the last time."""
        for k, addresses in enumerate((arguments, made)):
            first, self._counts[k] = self._counts[k], len(addresses)
            new = addresses[first:]
            places = range(first, len(addresses))
            self._places.update(zip(new, map(invert, places) if k else places, strict=True))
            self._slots.update(storages.slots_of(new))

    def get(self, address: int) -> int | None:
        """The place of a tensor."""
        return self._places.get(address)

    def are_apart(self, slots: Sequence[int]) -> bool:
        """Whether other storages are not those of the sequence, and each comes once."""
        return self._slots.isdisjoint(slots) and len({*slots}) == len(slots)
