"""``torch.UntypedStorage`` on the device: what PyTorch's C++ code would crash on.

PyTorch makes storages through an allocator per kind of device, which only C++ can provide, and
reads the addresses of others than CUDA's as host memory. `install` puts Python in front of both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from .. import devices

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
    _make_queues_refuse()


def _guarded(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        here = self.device.type == devices.NAME
        return (method if here else original)(self, *arguments, **keywords)

    return call


def _make(device: torch.device, content: Any = 0) -> Any:
    """A storage of ``content`` bytes, or with a sequence of bytes as its contents."""
    from ..storages import new_storage

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


_cannot_resize = _refuse(
    "the memory of a webgpu storage cannot be exchanged: use tensor.resize_(), which gives the "
    "tensor another storage where it has to grow"
)
_CANNOT_SEND = (
    "webgpu tensors cannot be sent to another process, as WebGPU does not share GPU memory: send "
    "tensor.cpu()"
)
_cannot_share = _refuse(_CANNOT_SEND, RuntimeError)
_FEEDER = "QueueFeederThread"  # of `multiprocessing.Queue`, which data loaders' workers use


def _raise(message: str) -> Any:
    raise RuntimeError(message)


def _reduce(tensor: Any, original: Callable[[Any], Any]) -> Any:
    """Makes the receiver raise where the sender cannot, or else it would wait for ever.

    A queue sends in a thread of its own, whose errors are printed and nothing more.
    """
    if tensor.device.type == devices.NAME and threading.current_thread().name == _FEEDER:
        return _raise, (_CANNOT_SEND,)
    return original(tensor)


def _make_queues_refuse() -> None:
    from multiprocessing.reduction import ForkingPickler

    for kind in (torch.Tensor, torch.nn.Parameter):
        original: Any = ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        if original is not None:
            ForkingPickler.register(kind, partial(_reduce, original=original))


_METHODS: dict[str, Callable[..., Any]] = {
    "new": _new,
    "_byteswap": _byteswap,
    "resize_": _cannot_resize,
    "_resize_with_addr_": _cannot_resize,
    "_swap_data_ptr_": _cannot_resize,
    "_share_fd_cpu_": _cannot_share,
    "_share_filename_cpu_": _cannot_share,
    "is_shared": lambda storage: False,
}
