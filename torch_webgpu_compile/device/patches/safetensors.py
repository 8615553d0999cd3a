"""``safetensors`` on the device: its Rust code has a fixed list of device names.

Patched: ``safetensors.safe_open``, once that package is imported: a front reads the file to the CPU
and moves its tensors.

Why: the Rust code refuses the name of a PrivateUse1 device other than those on its list.

Until: that list asks PyTorch for the name of its PrivateUse1 device.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import after_import

_PACKAGE = "safetensors"


def install() -> None:
    """Wraps ``safe_open``, now or when ``safetensors`` is imported."""
    after_import(_PACKAGE, _wrap)
    user = sys.modules.get(f"{_PACKAGE}.torch")
    if user is not None:
        user.safe_open = sys.modules[_PACKAGE].safe_open  # type: ignore[attr-defined]


def _wrap(module: Any) -> None:
    original = module.safe_open

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (original, _File))

    class safe_open(metaclass=Meta):
        __doc__ = original.__doc__

        def __new__(cls, filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
            if not _is_here(device):
                return original(filename, framework, device, **options)
            file = original(filename, framework, "cpu", **options)
            return _File(file, torch.device(device))

    module.safe_open = safe_open


def _is_here(device: Any) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == devices.NAME
    return isinstance(device, torch.device) and device.type == devices.NAME


class _File:
    """An open file, or a tensor in one, of which what is read goes to a device."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file = file
        self._device = device

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        return self._file.__exit__(kind, value, traceback)

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self, *arguments: Any) -> Any:
        tensors = self._file.get_tensors(*arguments)
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    def get_slice(self, name: str) -> Any:
        return _File(self._file.get_slice(name), self._device)

    def __getitem__(self, index: Any) -> Any:
        return self._file[index].to(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
