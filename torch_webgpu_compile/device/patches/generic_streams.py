"""``torch.Stream`` and ``torch.Event``, which are for whatever the accelerator is.

Patched: ``torch.Stream`` and ``torch.Event``, also in ``torch._C``. Called for the device, they
make objects of ``torch.webgpu``'s classes; for others, PyTorch's. ``isinstance`` and
``issubclass`` answer as before.

Why: PyTorch's objects ask the device's guard to wait and to take the time. A guard in Python cannot
be asked: events raise ("Backend doesn't support synchronizing events"), and streams say that they
have waited when they have not.

Until: a device guard in Python can wait for streams and events.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tensors import devices
from ..registration import untraced
from . import accelerator

_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)


class _Generic(type):
    """The class of a name that stands for its base; what is derived from it is like any class."""

    def __instancecheck__(cls, instance: object) -> bool:
        if _stands_for_base(cls):
            return isinstance(instance, cls.__bases__)
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if _stands_for_base(cls):
            return issubclass(subclass, cls.__bases__)
        return super().__subclasscheck__(subclass)


def _stands_for_base(cls: type) -> bool:
    return cls.__module__ == "torch"


def _is_here(named: dict[str, Any]) -> bool:
    """Whether what a constructor was given names the device, or the accelerator, if that is it."""
    if "device_type" in named:  # of a stream, which three numbers name
        return bool(named["device_type"] == _DEVICE_TYPE)
    device = named.get("device")
    place = accelerator.current() if device is None else torch.device(device)
    return place.type == devices.NAME


def _stream(device: Any = None, device_index: int | None = None, **_: Any) -> Any:
    return torch.get_device_module(devices.NAME).Stream(
        device if device_index is None else device_index
    )


def _event(device: Any = None, **keywords: Any) -> Any:
    return torch.get_device_module(devices.NAME).Event(
        **keywords
    )  # of the device on which it will be recorded


def install() -> None:
    """Puts classes that choose in the places of PyTorch's."""
    for name, make in (("Stream", _stream), ("Event", _event)):
        chosen = _choosing(getattr(torch, name), make)
        setattr(torch, name, chosen)
        setattr(torch._C, name, chosen)  # where Dynamo has them made


def _choosing(original: Any, make: Any) -> Any:
    """A class in the place of another one, which has ``make`` make what is for the device."""

    @untraced
    def __new__(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        named = {**dict(zip(("device",), arguments, strict=False)), **keywords}
        if cls is chosen and len(arguments) < 2 and _is_here(named):
            return make(**named)
        return original.__new__(cls, *arguments, **keywords)

    content = {"__new__": __new__, "__module__": "torch", "__doc__": original.__doc__}
    chosen: Any = _Generic(original.__name__, (original,), {**content, "__slots__": ()})
    return chosen
