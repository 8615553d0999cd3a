"""PyTorch's switches for repeatable results, and what was compiled for either position of them.

``torch.use_deterministic_algorithms(True)`` asks for the same bits in every run. Dynamo's guards
know the switch, so that a function is traced again after a change, and AOTAutograd raises where it
was set between a forward graph and its backward. Single operators have no guards: they are
`Switched` where it makes a difference. Nothing here raises because of it, so that ``warn_only`` has
nothing to warn of: operators have repeatable kernels, or run on the host, where PyTorch's checks
apply.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from .options import CompileOptions

is_on: Callable[[], bool] = torch._C._get_deterministic_algorithms

T = TypeVar("T")


def fills_empty() -> bool:
    """Whether memory that the user leaves unwritten is to hold NaN and largest integers."""
    return is_on() and _fills_when_on()


def _fills_when_on() -> bool:
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def switched(options: CompileOptions, deterministic: bool | None = None) -> CompileOptions:
    """``options`` with PyTorch's switches as they are, or as if the first were in a position."""
    on = is_on() if deterministic is None else deterministic
    return replace(options, deterministic=on, fill_empty=on and _fills_when_on())


class Switched(Generic[T]):
    """Something compiled for ``torch.use_deterministic_algorithms`` on, and for off, when needed.

    Args:
        make: compiles it for a position of the switch.
        deterministic: the position that ``made`` was compiled for.
        made: what has been compiled already.
    """

    def __init__(self, make: Callable[[bool], T], deterministic: bool, made: T) -> None:
        self._make = make
        self._made = {deterministic: made}
        self._lock = threading.Lock()

    @property
    def made(self) -> tuple[T, ...]:
        """What has been compiled so far: for one position of the switch, or for both."""
        return tuple(self._made.values())

    def __call__(self) -> T:
        """What is compiled for the present position of the switch; compiles it if needed."""
        on = is_on()
        found = self._made.get(on)
        if found is None:
            with self._lock:
                if on not in self._made:
                    self._made[on] = self._make(on)
                found = self._made[on]
        return found
