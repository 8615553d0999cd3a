"""``torch.UntypedStorage`` on the device: what PyTorch's C++ code would crash on.

Patched: ``torch.UntypedStorage.__new__``, and the methods in `_METHODS`; for other devices they do
what they did.

Why: PyTorch makes storages through an allocator per kind of device, which only C++ can provide, and
reads the addresses of others than CUDA's as host memory.

Until: a PrivateUse1 backend in Python can provide that allocator, and these methods ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ...tensors import devices
from .sending import CANNOT_SEND

Storage: Any = torch.UntypedStorage  # its methods have no types


def install() -> None:
    """Replaces methods of ``torch.UntypedStorage``; for other devices they do what they did."""
    original = Storage.__new__

    def new(cls: type[Any], *arguments: Any, **keywords: Any) -> Any:
        device = keywords.get("device")
        if device is None or torch.device(device).type != devices.NAME:
            return original(cls, *arguments, **keywords)
        return _make(torch.device(device), *arguments)

    Storage.__new__ = staticmethod(new)
    for name, method in _METHODS.items():
        if hasattr(Storage, name):  # some are newer than PyTorch 2.11
            setattr(Storage, name, _guarded(getattr(Storage, name), method))


def _guarded(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        here = self.device.type == devices.NAME
        return (method if here else original)(self, *arguments, **keywords)

    return call


def _make(device: torch.device, content: Any = 0) -> Any:
    """A storage of ``content`` bytes, or with a sequence of bytes as its contents."""
    from ...tensors.storages import new_storage  # not at the top: `import torch` imports this

    index = devices.index_of(device)
    if isinstance(content, int):
        return new_storage(content, index)
    storage = new_storage(len(content), index)
    return storage.copy_(Storage(content))


def _new(storage: Any) -> Any:
    return _make(storage.device)


def _byteswap(storage: Any, element_size: int) -> None:
    host = storage.cpu()
    host._byteswap(element_size)
    storage.copy_(host)


def _refuse(reason: str, error: type[Exception] = NotImplementedError) -> Callable[..., Any]:
    def method(storage: Any, *_: Any, **__: Any) -> Any:
        raise error(reason)

    return method


def _resize(storage: Any, nbytes: Any) -> Any:
    from ...tensors.storages import resize

    resize(storage, int(nbytes))
    return storage


def _nbytes(storage: Any) -> int:
    from ...tensors.storages import nbytes_of

    return nbytes_of(storage)


_cannot_resize = _refuse(
    "the memory of a webgpu storage cannot be exchanged: use storage.resize_() or tensor.resize_()"
)
_cannot_share = _refuse(CANNOT_SEND, RuntimeError)
_METHODS: dict[str, Callable[..., Any]] = {
    "new": _new,
    "_byteswap": _byteswap,
    "__len__": _nbytes,
    "nbytes": _nbytes,
    "resize_": _resize,
    "_resize_with_addr_": _cannot_resize,
    "_swap_data_ptr_": _cannot_resize,
    "_share_fd_cpu_": _cannot_share,
    "_share_filename_cpu_": _cannot_share,
    "is_shared": lambda storage: False,
}
