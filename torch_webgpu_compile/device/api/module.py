"""``torch.webgpu``: the counterpart of ``torch.cuda``.

Importing it is a part of ``import torch``: it opens nothing and imports no WebGPU implementation.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from ...tensors import devices
from ...tensors import generators as random
from ..registration import untraced
from . import amp, backend_module, memory, properties, refused, streams, waits
from .storage_types import storage_type

OutOfMemoryError = torch.OutOfMemoryError  # a base of this package's

profiler: Any = ModuleType("torch.webgpu.profiler", "Tracing tools of GPUs, which WebGPU has not.")
vars(profiler).update(refused.functions("profiler."))

__all__ = [
    "OutOfMemoryError",
    "amp",
    "can_device_access_peer",
    "current_device",
    "device",
    "device_count",
    "device_of",
    "get_amp_supported_dtype",
    "init",
    "ipc_collect",
    "is_available",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "memory",
    "profiler",
    "random",
    "reset_device",
    "set_device",
    "streams",
]
for _part in (memory, properties, random, streams, waits):
    _public = {name: getattr(_part, name) for name in _part.__all__ if not name.startswith("_")}
    globals().update(_public)
    __all__ += _public

_REFUSED = refused.functions() | refused.functions("memory.")
globals().update(_REFUSED)
__all__ += ["default_generators", *_REFUSED]  # noqa: F822 by `__getattr__`

_Device = torch.device | str | int | None


def is_available() -> bool:
    """Whether there is a GPU that WebGPU can use. Never raises for the lack of one."""
    return device_count() > 0


def device_count() -> int:
    """How many GPUs there are. Software adapters count only where there is no other."""
    return devices.device_count()


def is_initialized() -> bool:
    """Whether a device has been opened in this process."""
    return bool(devices.opened())


def init() -> None:
    """Opens the current device, which otherwise happens when it is first used.

    Raises:
        AdapterError: there is no adapter; the message says what to install.
        RuntimeError: the process was forked after the parent looked for GPUs.
    """
    _lazy_init()
    devices.get_device(devices.current_index())


def current_device() -> int:
    """The index of the calling thread's current device."""
    return devices.current_index()


def set_device(device: _Device) -> None:
    """Makes a device current for the calling thread; a negative index does nothing.

    Raises:
        AdapterError: there is no such device.
        ValueError: it is not a ``webgpu`` device.
    """
    devices.set_current(devices.resolve_index(device))


class device:
    """A context in which a device is current.

    Args:
        device: an index, a name or a ``torch.device``; None or a negative index does nothing.
    """

    def __init__(self, device: _Device) -> None:
        self.idx = -1 if device is None else devices.resolve_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = devices.set_current(self.idx)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        devices.set_current(self.prev_idx)


class device_of(device):
    """A context in which the device of a tensor or storage is current; of others, nothing is."""

    def __init__(self, obj: Any) -> None:
        super().__init__(obj.get_device() if obj.device.type == devices.NAME else None)


def reset_device(device: _Device = None) -> None:
    """Makes a lost device (the current one by default) usable again, for new tensors.

    The memory of its tensors is freed: whatever reads or writes them raises DeviceLostError. What
    was compiled for the device stays and works on new tensors. Does nothing to a device that works,
    so that it may be called after any error.

    Raises:
        ValueError: it is not a ``webgpu`` device.
    """
    # Not at the top: `import torch` imports this file.
    from ...callables import part_writes, static_copies
    from ...tensors import storages

    index = devices.resolve_index(device)
    lost = devices.take_lost(index)
    if lost is None:
        return
    storages.lose(lost, index)
    part_writes.forget()
    static_copies.drop(lost)
    lost.abandon()


def can_device_access_peer(device: _Device, peer_device: _Device) -> bool:
    """False: WebGPU devices share no memory.

    Raises:
        AdapterError: there is no such device.
    """
    for place in (device, peer_device):
        devices.check_index(devices.resolve_index(place))
    return False


def ipc_collect() -> None:
    """Does nothing: WebGPU shares no memory with other processes that could be given back."""


def is_current_stream_capturing() -> bool:
    """False: WebGPU cannot capture commands."""
    return False


def is_tf32_supported() -> bool:
    """False: WGSL computes with float32 as it is."""
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes of ``torch.autocast("webgpu")``."""
    from . import autocast

    autocast.register()  # autocast asks before its first use, which may be without a device
    return [torch.float16, torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return devices.is_in_bad_fork()


def _lazy_init() -> None:
    """PyTorch calls it when a device is first named."""
    devices.check_fork()
    from ..eager import kernels  # the compiler, which takes a second
    from . import autocast

    kernels.register()
    autocast.register()  # ``torch.autocast("webgpu:0")`` does not ask for it


def _keep_dynamo_out() -> None:
    """Dynamo calls some of these while it traces: to keep the state of random numbers, for one."""
    for name in __all__:
        if isinstance(found := globals().get(name), FunctionType):
            untraced(found)


_keep_dynamo_out()


def __getattr__(name: str) -> Any:
    if name == "_initialized":  # torch.utils.checkpoint asks before it saves generators' states
        return is_initialized()
    if name.endswith("Storage") and (found := storage_type(name)) is not None:
        return found
    if name == "default_generators":
        return random.default_generators()
    raise AttributeError(f"module 'torch.webgpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, without the modules and helpers behind them."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def add_submodules() -> None:
    """Lets ``import torch.webgpu.amp`` and the like find them, and adds ``torch.backends.webgpu``.

    PyTorch adds ``torch.webgpu``, but no modules in it.
    """
    for name in __all__:
        if isinstance(found := globals().get(name), ModuleType):
            sys.modules[f"torch.{devices.NAME}.{name}"] = found
    vars(torch.backends)[devices.NAME] = backend_module
    sys.modules[f"torch.backends.{devices.NAME}"] = backend_module


class _utils:
    """The module in which ``torch.load`` looks for a function."""

    @staticmethod
    def _get_device_index(device: _Device, optional: bool = False, allow_cpu: bool = False) -> int:
        return devices.resolve_index(device)


_exchange_device = devices.set_current
_maybe_exchange_device = devices.set_current
