"""Models with random weights, made in the time that it takes to write them.

The initialisers of a billion weights take most of a minute. Where only shapes matter they may be
repetitions of one random row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Built = TypeVar("_Built")

_ROW = 1_000_003  # a prime: rows of weights are not alike


# Of tensors' methods, of torch.nn.init, and of what libraries put in its place.
_DRAW = frozenset({"normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_"})


class _Undrawn(TorchFunctionMode):
    """Initialisers do nothing; ``left`` are the tensors that they were called on."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in _DRAW:
            tensor: Tensor = args[0] if args else (kwargs or {})["tensor"]
            self.left[id(tensor)] = tensor
            return tensor
        return func(*args, **(kwargs or {}))


def with_cheap_weights(build: Callable[[], _Built]) -> _Built:
    """What ``build`` makes, with weights of the variance that keeps that of activations."""
    with _Undrawn() as undrawn:
        built = build()
    row = torch.randn(_ROW)
    with torch.no_grad():
        for tensor in undrawn.left.values():
            fan_in = tensor.numel() / max(len(tensor), 1) if tensor.dim() > 1 else 5000
            _repeat((row * math.sqrt(2 / max(fan_in, 1))).to(tensor.dtype), tensor)
    return built


def _repeat(row: Tensor, tensor: Tensor) -> None:
    flat = tensor.detach().view(-1)
    whole = len(flat) // len(row) * len(row)
    flat[:whole].view(-1, len(row)).copy_(row)
    flat[whole:].copy_(row[: len(flat) - whole])
