"""``DistributedDataParallel``: what its C++ and Python code only does for devices that it knows.

Patched: ``torch.distributed.Reducer``, and ``DistributedDataParallel._check_comm_hook``.

Why: the reducer brings its map of the parameters that were used to a PrivateUse1 device through
pinned memory, for which only C++ can provide an allocator (with ``find_unused_parameters`` or
``static_graph``). And hooks for bfloat16 are refused by their names where there is no NCCL.

Until: the reducer needs no pinned memory for a PrivateUse1 device, and the check asks what the
device can do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...tensors import devices
from ..import_hooks import around

_empty = torch.ops.aten.empty.memory_format


_Mode: Any = TorchDispatchMode  # its methods have no types


class _MapsOnHost(_Mode):  # type: ignore[misc]
    """Keeps tensors of int32 on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        here = device is not None and device.type == devices.NAME
        if func is _empty and here and kwargs.get("dtype") is torch.int32:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def install() -> None:
    """Replaces the reducer; does nothing without ``torch.distributed``."""
    distributed: Any = torch.distributed
    if distributed.is_available():
        distributed.Reducer = _reducer(distributed.Reducer)


def _reducer(original: Any) -> Any:
    class Reducer(original):  # type: ignore[misc]
        """Reduces gradients; its map of the parameters that were used stays on the host.

        PyTorch would bring the map to a PrivateUse1 device through pinned memory, for which only
        C++ can provide an allocator (with ``find_unused_parameters`` or ``static_graph``).
        """

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            with _MapsOnHost():
                super().__init__(*arguments, **keywords)

        def _set_static_graph(self) -> None:
            with _MapsOnHost():
                super()._set_static_graph()

    Reducer.__qualname__ = "Reducer"
    return Reducer


@around("torch.nn.parallel.distributed:DistributedDataParallel._check_comm_hook")
def check_comm_hook(original: Any, self: Any, hook: Any) -> None:
    """Hooks that PyTorch refuses by their names where there is no NCCL: those for bfloat16."""
    if self.device_type == devices.NAME and callable(hook):
        given, hook = hook, lambda *arguments: None
        functools.update_wrapper(hook, given)  # with the signature, which is checked
        hook.__name__ = "hook"
    original(self, hook)
