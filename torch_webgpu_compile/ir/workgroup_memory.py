"""Arrays in workgroup memory, and how parts of a joint kernel share them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkgroupArray:
    """An array in workgroup memory: the WGSL type of its elements, and their number and size."""

    type: str
    length: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of workgroup memory."""
        return self.length * self.itemsize


def shared_arrays(
    wanted: Iterable[Sequence[WorkgroupArray]],
) -> dict[tuple[str, int], WorkgroupArray]:
    """The arrays that serve any of several parts: a workgroup computes only one of them.

    By their type and their number among those of a type.
    """
    found: dict[tuple[str, int], WorkgroupArray] = {}
    for arrays in wanted:
        for key, array in zip(array_keys(arrays), arrays, strict=True):
            if key not in found or found[key].length < array.length:
                found[key] = array
    return found


def array_keys(arrays: Sequence[WorkgroupArray]) -> list[tuple[str, int]]:
    """The key of each of a part's arrays in `shared_arrays`."""
    counts: Counter[str] = Counter()
    keys = []
    for array in arrays:
        keys.append((array.type, counts[array.type]))
        counts[array.type] += 1
    return keys
