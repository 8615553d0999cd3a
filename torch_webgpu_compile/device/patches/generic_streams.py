"""``torch.Stream`` and ``torch.Event``, which are for whatever the accelerator is.

Patched: ``torch.Stream`` and ``torch.Event``, also in ``torch._C``. Called for the device, they make objects of
``torch.webgpu``'s classes; for others, PyTorch's. ``isinstance`` and ``issubclass`` answer as
before.

Why: PyTorch's objects ask the device's guard to wait and to take the time. A guard in Python cannot
be asked: events raise ("Backend doesn't support synchronizing events"), and streams say that they
have waited when they have not.

Until: a device guard in Python can wait for streams and events.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import devices
from ..api import streams
from . import accelerator


class _Generic(type):
    """The class of a name that stands for ``_original``; what is derived from it is like any class.

    Calling the name for the device makes an object by ``_make``, which takes the device and what
    was given by keyword.
    """

    _original: Any
    _make: Any

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if "_original" not in vars(cls):
            return super().__call__(*arguments, **keywords)
        named = dict(zip(("device",), arguments, strict=False), **keywords)
        if _is_here(named) and len(arguments) < 2:
            return cls._make(**named)
        return cls._original(*arguments, **keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        if "_original" in vars(cls):
            return isinstance(instance, cls._original)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "_original" in vars(cls):
            return issubclass(subclass, cls._original)
        return super().__subclasscheck__(subclass)


def _is_here(named: dict[str, Any]) -> bool:
    """Whether what a constructor was given names the device, or the accelerator, if that is it."""
    if "device_type" in named:  # of a stream, which three numbers name
        return bool(named["device_type"] == streams.DEVICE_TYPE)
    device = named.get("device")
    place = accelerator.current() if device is None else torch.device(device)
    return place.type == devices.NAME


def _stream(device: Any = None, device_index: int | None = None, **_: Any) -> streams.Stream:
    return streams.Stream(device if device_index is None else device_index)


def _event(device: Any = None, **keywords: Any) -> streams.Event:
    return streams.Event(**keywords)  # of the device on which it will be recorded


def install() -> None:
    """Puts classes that choose in the places of PyTorch's."""
    for name, make in (("Stream", _stream), ("Event", _event)):
        original: Any = getattr(torch, name)
        content = {
            "_original": original,
            "_make": staticmethod(make),
            "__doc__": original.__doc__,
            "__module__": "torch",
            "__slots__": (),
        }
        chosen = _Generic(name, (original,), content)
        setattr(torch, name, chosen)
        setattr(torch._C, name, chosen)  # where Dynamo has them made
