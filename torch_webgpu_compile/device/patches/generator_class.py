"""``torch.Generator(device="webgpu")``: numbers of one's own for operators on the device.

Patched: the name ``torch.Generator``. It becomes a subclass of itself: what it makes for other
devices is PyTorch's, and what is an instance of the one is an instance of the other.

Why: PyTorch asks a PrivateUse1 backend for an object that only C++ can provide. A generator on the
host serves, as kernels take a seed of it for each call (`generators.draw_seeds`); it says that it
is on the device, which is what programs ask, and PyTorch's kernels for the CPU.

Until: a PrivateUse1 backend in Python can provide generators.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tensors import devices, generators

_PyTorchs: Any = torch.Generator


class _Kind(type(_PyTorchs)):  # type: ignore[misc]
    """The class of ``torch.Generator``."""

    def __call__(cls, device: Any = "cpu", *rest: Any, **keywords: Any) -> Any:
        place = torch.device("cpu" if device is None else device)
        if place.type != devices.NAME:
            return _PyTorchs(place, *rest, **keywords)
        return generators.DeviceGenerator(devices.torch_device(devices.resolve_index(place)))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _PyTorchs)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(subclass, _PyTorchs)


def install() -> None:
    """Puts the subclass in the place of ``torch.Generator``, once."""
    if type(torch.Generator) is _Kind:
        return
    members = {"__doc__": _PyTorchs.__doc__, "__module__": "torch", "__slots__": ()}
    generator: Any = _Kind("Generator", (_PyTorchs,), members)
    torch.Generator = generator  # type: ignore[misc]
