"""The GPUs of ``torch.device("webgpu", i)``: which there are, which is current, opened when used.

The order is that of the adapters, best first; ``TORCH_WEBGPU_ADAPTER`` chooses and orders them by
parts of their names or numbers, separated by commas, as ``CUDA_VISIBLE_DEVICES`` does. The same one
may be named several times: ``0,0`` makes two devices of one GPU.

This module is imported by ``import torch``: it imports the runtime only when a GPU is asked for.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import AdapterError, DeviceError, OptionError, join_pytorch

if TYPE_CHECKING:
    from ..runtime.device import AdapterInfo, Device

NAME = "webgpu"

join_pytorch(torch.OutOfMemoryError)  # whatever raises it imports this module before


class _Ordinal(NamedTuple):
    """An adapter, and how many ordinals before it name the same one."""

    adapter: AdapterInfo
    instance: int


class _DeviceState(threading.local):
    current: int = 0


_state = _DeviceState()
_lock = threading.RLock()
_open: dict[int, Device] = {}
_ordinals: list[_Ordinal] | None = None
_provider = ""  # of the adapters that they name
_forked = False
_when_several: list[Callable[[], None]] = []
_settings: dict[str, Callable[[int, Device], None]] = {}


def _find() -> list[_Ordinal]:
    global _ordinals, _provider
    with _lock:
        check_fork()
        if _ordinals is None:
            from ..options import resolve
            from ..runtime.adapters import choose_provider
            from ..runtime.device import list_adapters

            options = resolve(None, None)
            _provider = choose_provider(options.provider, options.first_adapter)
            adapters = list_adapters(_provider)
            found = [_match(part, adapters) for part in options.adapters] or _distinct(adapters)
            numbers = [info.index for info in found]
            ordinals = [
                _Ordinal(info, numbers[:position].count(info.index))
                for position, info in enumerate(found)
            ]
            if not ordinals:
                return []  # look again next time: a driver may be installed meanwhile
            _ordinals = ordinals
        return _ordinals


def _match(wanted: str, adapters: list[AdapterInfo]) -> AdapterInfo:
    for info in adapters:
        if wanted.isdecimal() and info.index == int(wanted):
            return info
        if not wanted.isdecimal() and wanted.lower() in info.name.lower():
            return info
    names = "; ".join(f"{info.index}: {info.name} ({info.backend})" for info in adapters)
    raise AdapterError(f"TORCH_WEBGPU_ADAPTER: no adapter matches {wanted!r}; there are {names}")


def _distinct(adapters: list[AdapterInfo]) -> list[AdapterInfo]:
    """Every GPU once, through its best driver interface.

    OpenGL and software only when there is nothing else.
    """
    modern = [info for info in adapters if not info.backend.startswith("OpenGL")]
    best: dict[str, str] = {}
    for info in modern:
        best.setdefault(info.name, info.backend)
    once = [info for info in modern if info.backend == best[info.name]]
    return [info for info in once if info.type != "cpu"] or once or adapters[:1]


def device_count() -> int:
    """How many GPUs there are; 0 without a usable adapter. Opens none of them.

    PyTorch asks this in the middle of anything, so a setting that is not valid is only warned of
    here; whoever uses a device gets the error.
    """
    if _forked:
        return len(_ordinals or ())
    try:
        return len(_find())
    except AdapterError:
        return 0
    except OptionError as error:
        warnings.warn(f"there is no webgpu device: {error}", RuntimeWarning, stacklevel=2)
        return 0


def current_index() -> int:
    """The calling thread's current device."""
    return _state.current


def set_current(index: int) -> int:
    """Makes a device current for the calling thread; the one that was. Negative: does nothing.

    Raises:
        AdapterError: there is no such device.
    """
    before = _state.current
    if index >= 0 and index != before:
        _state.current = check_index(index) if index else 0
        if index:
            prepare_several()
    return before


def when_several(function: Callable[[], None]) -> None:
    """Calls ``function`` before the process first uses a device other than the first."""
    _when_several.append(function)


def prepare_several() -> None:
    """Says that a device other than the first is about to be used: see `when_several`."""
    while _when_several:
        _when_several.pop()()


def adapter_of(index: int) -> AdapterInfo:
    """The adapter of a device, which is not opened. Raises as `check_index` does."""
    return _find()[check_index(index)].adapter


def check_index(index: int) -> int:
    """``index``, if there is such a device.

    Raises:
        AdapterError: there is none; the message says what there is.
    """
    count = len(_find())
    if not 0 <= index < count:
        raise AdapterError(
            f"webgpu:{index} does not exist: there {'is' if count == 1 else 'are'} {count} WebGPU "
            f"adapter{'' if count == 1 else 's'}; run `python -m torch_webgpu_compile doctor`, or "
            "let processes share one: TORCH_WEBGPU_ADAPTER=0,0 makes two devices of it"
        )
    return index


@functools.cache
def torch_device(index: int) -> torch.device:
    """PyTorch's name of a device."""
    return torch.device(NAME, index)


def index_of(device: torch.device | None) -> int:
    """The index of a ``webgpu`` device; the current one when it names none."""
    if device is None or device.index is None:
        return _state.current
    return device.index


def resolve_index(device: torch.device | str | int | None) -> int:
    """The index that a user means by a device, its name or its number; the current one by None.

    Raises:
        ValueError: the device is not a ``webgpu`` device.
    """
    if device is None:
        return _state.current
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != NAME:
        raise ValueError(f"Expected a webgpu device, but got: {found}")
    return index_of(found)


def is_opened(index: int) -> bool:
    """Whether a device has been used in this process."""
    return index in _open


def opened() -> list[Device]:
    """The devices that have been used in this process."""
    return list(_open.values())


def get_device(index: int) -> Device:
    """The open device ``webgpu:index``.

    Raises:
        AdapterError: there is no such adapter, or it gives no device.
        DeviceLostError: it was lost, and nobody has called ``torch.webgpu.reset_device`` yet.
        RuntimeError: the process was forked after a device was opened.
    """
    device = _open.get(index)
    if device is None or device.is_closed:
        device = _open_device(index)
    elif device.backend.lost_cause:  # `is_lost`, as every new tensor asks for it
        raise device.lost_error(f"{NAME}:{index}")
    return device


def index_with(device: Device) -> int:
    """The number of a device that is open.

    Raises:
        DeviceError: it is none of PyTorch's, as it was opened with other options.
    """
    for index in range(device_count()):
        if get_device(index) is device:
            return index
    raise DeviceError(
        f"the device of a compiled graph is none of {NAME}:0 to {NAME}:{device_count() - 1}, so "
        "that operators with an implementation for webgpu tensors cannot run on it; compile "
        "without the options that choose another adapter or checks"
    )


def set_up(purpose: str, function: Callable[[int, Device], None]) -> None:
    """Calls ``function(index, device)`` for each device that is open, and each that will be.

    Args:
        purpose: names it. Another function for the same purpose takes its place.
    """
    with _lock:
        _settings[purpose] = function
        for index, device in _open.items():
            function(index, device)


def take_lost(index: int) -> Device | None:
    """The device ``webgpu:index`` if it is lost; the next use of it opens a new one."""
    with _lock:
        device = _open.get(index)
        if device is None or not device.find_loss():
            return None
        return _open.pop(index)


def _open_device(index: int) -> Device:
    with _lock:
        check_fork()
        check_index(index)
        from ..options import resolve
        from ..runtime.device import open_device

        options = resolve(None, None)
        adapter, instance = _find()[index]
        device = open_device(_provider, adapter.index, options.checked, instance)
        for function in _settings.values():
            function(index, device)
        _open[index] = device
        return device


def check_fork() -> None:
    """Raises RuntimeError in a child process that was forked after GPUs were looked for.

    A GPU's driver may start threads as soon as it is asked what there is; a fork loses them.
    """
    if _forked:
        raise RuntimeError(
            "Cannot re-initialize WebGPU in forked subprocess. To use WebGPU with "
            "multiprocessing, you must use the 'spawn' start method"
        )


def is_in_bad_fork() -> bool:
    """Whether this process was forked after GPUs were looked for."""
    return _forked


def _after_fork() -> None:
    global _forked, _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    if _open or _ordinals is not None:
        _forked = True
        _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
