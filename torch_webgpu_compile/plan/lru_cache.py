"""A least-recently-used cache, and how many entries caches of resolved plans have."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_DISPATCHES = 8192
_FEWEST, _MOST = 16, 64


def max_resolved_sizes(dispatches: int) -> int:
    """How many sets of sizes a plan of so many dispatches stays resolved for.

    A resolved dispatch takes 5 KB of host memory and 0.2 ms to make, and what belongs to the set
    some 10 KB, so a plan gets at most 40 MB, unless that is fewer than 16 sets. An operator, of
    which there are hundreds, gets 64 sets, which is 1 MB.
    """
    return min(_MOST, max(_FEWEST, _DISPATCHES // max(1, dispatches)))


class LruCache(OrderedDict[K, V]):
    """A least-recently-used cache of at most ``capacity`` values.

    Safe to use from several threads, as far as a dictionary is: a value may be made twice.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def find(self, key: K) -> V | None:
        """The value of a key, which becomes the most recently used; None without one."""
        try:
            self.move_to_end(key)
        except KeyError:
            return None
        return self.get(key)  # None if another thread has just dropped it

    def keep(self, key: K, value: V) -> V:
        """Adds a value, or marks it as used; evicts the values used longest ago."""
        self.pop(key, None)
        self[key] = value
        while len(self) > self.capacity:
            with suppress(KeyError):
                self.popitem(last=False)
        return value
