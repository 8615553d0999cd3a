"""PyTorch's switches for repeatable results, and compiled operators for either position of them.

``torch.use_deterministic_algorithms(True)`` asks for the same bits in every run. Dynamo's guards
know the switch, so that a function is traced again after a change, and AOTAutograd raises where it
was set between a forward graph and its backward. Single operators have no guards: where it makes a
difference, what `device.eager` compiles is for one position. Nothing here raises because of it, so
that ``warn_only`` has nothing to warn of: operators have repeatable kernels, or run on the host,
where PyTorch's checks apply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..options import CompileOptions
from ..torch_private import _get_deterministic_algorithms

is_on: Callable[[], bool] = _get_deterministic_algorithms


def fills_empty() -> bool:
    """Whether memory that the user leaves unwritten is to hold NaN and largest integers."""
    return is_on() and _fills_when_on()


def _fills_when_on() -> bool:
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def switched(options: CompileOptions) -> CompileOptions:
    """``options`` with PyTorch's switches as they are."""
    on = is_on()
    return replace(options, deterministic=on, fill_empty=on and _fills_when_on())
