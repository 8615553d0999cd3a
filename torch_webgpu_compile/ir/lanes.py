"""`Lanes`: how often a graph is computed side by side, each time on tensors of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lanes:
    """How a graph of one entry of each list is repeated for whole lists.

    Its inputs are the lane's own tensors, which it may change, then what all lanes share.

    Attributes:
        count: lanes, at most.
        own: inputs that each lane has of its own.
        numbers: whether the last input has numbers.
        shared_numbers: how many of these, the first ones, are the same for all lanes.
    """

    count: int
    own: int
    numbers: bool
    shared_numbers: int
