"""What is kept for calls to come, and how much of it."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

_DISPATCHES = 8192
_FEWEST, _MOST = 16, 64


def most_sizes(dispatches: int) -> int:
    """How many sets of sizes a plan of so many dispatches stays resolved for.

    A resolved dispatch takes 5 KB of host memory and 0.2 ms to make, and what belongs to the set
    some 10 KB, so a plan gets at most 40 MB, unless that is fewer than 16 sets. An operator, of
    which there are hundreds, gets 64 sets, which is 1 MB.
    """
    return min(_MOST, max(_FEWEST, _DISPATCHES // max(1, dispatches)))


class Recent(OrderedDict[K, V]):
    """The values that were used last, at most ``most`` of them.

    Safe to use from several threads, as far as a dictionary is: a value may be made twice.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: K) -> V | None:
        """The value of a key, which is then the last one used."""
        try:
            self.move_to_end(key)
        except KeyError:
            return None
        return self.get(key)  # None if another thread has just dropped it

    def keep(self, key: K, value: V) -> V:
        """Adds a value, or says that it is used; those that were used longest ago go."""
        self.pop(key, None)
        self[key] = value
        while len(self) > self.most:
            with suppress(KeyError):
                self.popitem(last=False)
        return value
