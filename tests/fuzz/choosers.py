"""Where the choices of a random program come from.

Hypothesis shrinks what it drew (``test_random_graphs.py``); ``random.Random`` needs nothing that is
not in Python, for long runs on machines that have PyTorch and this package only (``long.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol


class Chooser(Protocol):
    """Four kinds of choices."""

    def choose(self, options: Sequence[Any]) -> Any:
        """One of the options; the first is the simplest."""

    def integer(self, low: int, high: int) -> int:
        """low ≤ n ≤ high."""

    def flag(self) -> bool:
        """False is the simplest."""

    def permutation(self, rank: int) -> list[int]:
        """An order of ``rank`` dimensions."""


class RandomChooser:
    """Choices of a seeded generator: the same seed gives the same program on every machine."""

    def __init__(self, seed: int | str) -> None:
        self._random = Random(seed)

    def choose(self, options: Sequence[Any]) -> Any:
        return options[self._random.randrange(len(options))]

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def flag(self) -> bool:
        return self._random.random() < 0.5

    def permutation(self, rank: int) -> list[int]:
        return self._random.sample(range(rank), rank)
