"""View operators: PyTorch's own C++ kernels for the CPU only compute sizes and strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..storages import CPU_KEYS

_NAMES = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "set_.source_Storage_storage_offset",
    "set_.source_Storage",
    "set_.source_Tensor",
    "_unsafe_view",
    "alias",
    "detach",
    "view_as_real",
    "view_as_complex",
    "_conj",
    "_neg_view",
    "is_set_to",
)


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by operator name."""
    found: dict[str, Callable[..., Any]] = {}
    for name in _NAMES:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU"):
            found[name] = partial(operator._handle.redispatch_boxed, CPU_KEYS)
    return found
