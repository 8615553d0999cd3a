"""Collectives of ``torch.distributed`` in a graph: made on the host, as those of eager tensors.

Dynamo and ``DTensor`` write them as operators of ``_c10d_functional``: one that starts, and a
``wait_tensor`` of its result. A host call ends with its results, so that there is nothing left to
wait for. They are no fallbacks: a GPU that WebGPU reaches has no other way to another process.
"""

from __future__ import annotations

from typing import Any

import torch

from ..torch_private import OpOverload
from .builder import Builder
from .fallback import host_call
from .registry import lowers
from .value import Value

_NAMES = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


def _register() -> None:
    functional = torch.ops._c10d_functional
    for name in _NAMES:
        _lower(getattr(functional, name).default)
    lowers(functional.wait_tensor.default)(lower_wait_tensor)


def _lower(overload: OpOverload) -> None:
    @lowers(overload)
    def lower_collective(builder: Builder, *arguments: Any, **keywords: Any) -> Any:
        """The collective, as a host call."""
        return host_call(builder, overload, arguments, keywords)


def lower_wait_tensor(builder: Builder, tensor: Value) -> Value:
    """``tensor`` itself: the host call that gives it has waited."""
    return tensor


if torch.distributed.is_available():
    _register()
