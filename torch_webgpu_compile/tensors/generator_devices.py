"""PyTorch's part of a generator says on which device it is, so that others refuse it.

PyTorch makes generators for the CPU alone where no backend in C++ makes others, and its kernels
for the CPU take those that say they are there, whatever Python says of them. Which device one is
on are two bytes, before the dispatch keys, which tell where these are.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from ..torch_private import DeviceType, DispatchKey, DispatchKeySet, Generator

_PyTorchs: Any = Generator
_SEARCHED_NBYTES = 512  # a generator for the CPU has a state of 2,500
_OF_CPU = b"\x00\xff"  # the type, and no index
_PRIVATE_USE = DeviceType.PrivateUse1.value
_WORD = 8


def move(generator: Any, place: torch.device) -> bool:
    """Has a generator that nobody else has yet be on ``place``; whether that is so then.

    What PyTorch knows of its state stays that of one for the CPU.
    """
    offset = _offset()
    if offset is None:
        return False
    address = generator._cdata + offset
    ctypes.memmove(address, bytes((_PRIVATE_USE, place.index)), len(_OF_CPU))
    if _PyTorchs.device.__get__(generator) == place:
        return True
    ctypes.memmove(address, _OF_CPU, len(_OF_CPU))
    return False


@cache
def _offset() -> int | None:
    """Where the device is in PyTorch's part of a generator; None if that is not to be told."""
    generator = _PyTorchs()
    data = ctypes.string_at(generator._cdata, _SEARCHED_NBYTES)
    keys = DispatchKeySet(DispatchKey.CPU).raw_repr().to_bytes(_WORD, "little")
    places = range(0, _SEARCHED_NBYTES - 2 * _WORD, _WORD)
    found = [
        place
        for place in places
        if data[place : place + 2] == _OF_CPU and data[place + _WORD : place + 2 * _WORD] == keys
    ]
    return found[0] if len(found) == 1 else None
