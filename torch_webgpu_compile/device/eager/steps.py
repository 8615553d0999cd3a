"""Whether an optimizer's step is being made: what `lists` gathers is calls of one step.

A step knows what it will call, whoever looks at its results and when. What is called elsewhere is
not gathered: whether somebody reads a tensor between two calls would decide what is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class _Step:
    """A step, for as long as PyTorch's wrapper of `Optimizer.step` runs, which has it."""

    __slots__ = ("__weakref__", "outer")

    def __init__(self, outer: ref[_Step] | None) -> None:
        self.outer = outer


class _Arguments(tuple[Any, ...]):
    """The arguments of a step, which end with it: after an error no hook is called."""

    step: _Step


class _Steps(threading.local):
    current: ref[_Step] | None = None


_steps = _Steps()


def is_within() -> bool:
    """Whether this thread is within a step."""
    current = _steps.current
    return current is not None and current() is not None


def watch(at_end: Callable[[], None]) -> None:
    """Begins to watch the steps of all optimizers.

    Args:
        at_end: called after each step.
    """

    def begin(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        passed = _Arguments(args)
        passed.step = _Step(_steps.current)
        _steps.current = ref(passed.step)
        return passed, kwargs

    def end(optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling() and isinstance(args, _Arguments):
            _steps.current = args.step.outer
            at_end()

    register_optimizer_step_pre_hook(begin)
    register_optimizer_step_post_hook(end)
